"""A kit of packages is installed where it fits, part by part, and says what is wrong where it does not."""

import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
VERSION = "{}.{}".format(*sys.version_info)


def module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("wheelhouse", DEPLOY / "wheelhouse.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


wheelhouse = module()


def wheel(folder: Path, name: str, files: dict[str, bytes], *, requires: tuple[str, ...] = ()) -> Path:
    """A wheel of version 1.0 that pip accepts."""
    folder.mkdir(parents=True, exist_ok=True)
    path, info = folder / f"{name}-1.0-py3-none-any.whl", f"{name}-1.0.dist-info"
    told = "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
    files = files | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{told}".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{file},,\n" for file in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w") as archive:
        for file, data in (files | {f"{info}/RECORD": record.encode()}).items():
            item = zipfile.ZipInfo(file)
            item.external_attr = (0o755 if file.endswith("/server") else 0o644) << 16
            archive.writestr(item, data)
    return path


def kit(tmp_path: Path, *, python: str = VERSION, relies_on: tuple[str, ...] = ("pytest",)) -> Path:
    """Two parts of a project whose larger package is cut; the first has 4,000 bytes and the second the rest."""
    files = tmp_path / "files"
    wheel(files, "tlt", {"flows/train.py": b"", "tlt_core/cluster/worker.py": b"import big.thing"})
    wheel(files, "big", {"big/thing.py": b"", "big/data.bin": os.urandom(4_000)})
    with zipfile.ZipFile(files / "model.zip", "w") as archive:
        archive.writestr("model/tokenizer.json", "{}")
    out = tmp_path / "kit"
    wheelhouse.pack(files, out, python_version=python, relies_on=relies_on, part_bytes=4_000)
    return out


def install(part: Path, target: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "install.py", "--target", str(target), "--home", str(target.parent / "home")]
    return subprocess.run(command, cwd=part, capture_output=True, text=True)


def test_parts_come_in_any_order_and_the_last_one_installs(tmp_path: Path) -> None:
    out, target = kit(tmp_path), tmp_path / "site"
    first, second = sorted(out.iterdir())
    assert any(name.endswith("-of-2") for name in json.loads((first / "kit.json").read_text())["parts"]["part-1"])
    waiting = install(second, target)
    assert (waiting.returncode, waiting.stdout.count("still to come: part-1")) == (0, 1), waiting.stderr
    assert not target.exists()
    (piece,) = first.glob("big*")
    piece.write_bytes(bytes(1) + (whole := piece.read_bytes())[1:])
    damaged = install(first, target)
    assert damaged.returncode == 1
    assert f"{piece.name} is missing or damaged" in damaged.stderr
    piece.write_bytes(whole)
    done = install(first, target)
    assert done.returncode == 0, done.stderr
    assert f"export PYTHONPATH={target}" in done.stdout
    assert (target / "big" / "data.bin").stat().st_size == 4_000
    assert (tmp_path / "home" / "models" / "model" / "tokenizer.json").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["files", "home", "kit", "site"], (
        "nothing is left behind"
    )


def test_another_python_is_refused(tmp_path: Path) -> None:
    told = install(kit(tmp_path, python="2.7") / "part-1", tmp_path / "site")
    assert told.returncode == 1
    assert f"the kit is for python 2.7, this is {VERSION}" in told.stderr


def test_what_is_there_may_be_told_in_pip_s_forms() -> None:
    for text in (
        "Package  Version  Editable project location\n-------  -------\nPy_YAML  6.0.2\nTorch 2.11.0+cu130\n",
        "# a comment\nPy.YAML==6.0.2\n-e git+ssh://host/x@1#egg=x\ntorch == 2.11.0+cu130\n",
    ):
        assert wheelhouse.present_versions(text) == {"py-yaml": "6.0.2", "torch": "2.11.0+cu130"}


def test_what_the_machine_has_in_a_version_that_does_not_fit_is_brought(tmp_path: Path) -> None:
    path = wheel(
        tmp_path, "a", {}, requires=("numpy<2", "rich>=13", "click<8; python_version<'3.0'", "x<1; extra=='y'")
    )
    present = {"numpy": "2.5.2", "rich": "15.0.0", "click": "8.5", "x": "2"}
    assert wheelhouse.refused([path], present, "3.12") == {"numpy"}
    assert wheelhouse.refused([path], {"numpy": ""}, "3.12") == set()


def test_the_example_s_kit_can_be_made() -> None:
    """Each package that runs import has a hash, or is on the machine."""
    traced = wheelhouse.present_versions((DEPLOY / "wheelhouse.txt").read_text()).keys()
    present = wheelhouse.present_versions((DEPLOY / "present-cuda-image.txt").read_text())
    assert {"torch", "ray", "prefect", "mlflow", "reasoning-gym"} <= traced
    assert traced - present.keys() <= wheelhouse.locked().keys()
