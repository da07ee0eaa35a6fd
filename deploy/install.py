"""What `make install` does in a fresh virtual environment, with progress messages.  Run by that environment's Python.

    uv, setuptools (pip) -> packages and the model (uv; pip where uv fails) -> torch (pip, or uv without a GPU)
                         -> this project -> CPU kernels

All but torch, and the CUDA libraries that its wheel brings, come with the hashes of deploy/requirements*.txt.  uv takes
a quarter of pip's time; where it fails (an index that only pip's settings know, a proxy), pip does it, with the same
hashes.  torch comes last: pip and its settings choose the wheel (CPU or CUDA).
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

_TORCH = "torch==2.13.0"
_TOOLS = ("--requirement", "deploy/requirements-build.txt")
_PACKAGES = ("--requirement", "deploy/requirements.txt", "--requirement", "deploy/requirements-dev.txt")
# No build in isolation: it would fetch a setuptools without a hash.
_LOCKED = ("--require-hashes", "--no-deps", "--no-build-isolation")
_QUIET_S = 10.0  # longest time without a line of output
_ENVIRONMENT = Path(sys.prefix)
_LOG = _ENVIRONMENT / "install.log"
_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
_PIP_INSTALL = (*_PIP, "install", "--progress-bar", "off")
_UV_INSTALL = (str(_ENVIRONMENT / "bin" / "uv"), "pip", "install", "--python", sys.executable)


def main() -> int:
    began_s = time.monotonic()
    _LOG.write_text("")
    settings = _pip_settings()
    print(
        "installing torch, Ray, Prefect, MLflow, DVC and about 250 other packages: 3 GB on the disk, a 0.9 GB "
        "download, one to three minutes.  On a machine with a GPU, torch adds several gigabytes of CUDA.\n"
        f"the installers' output: {_LOG}",
        flush=True,
    )
    if not _run("0/4 uv and setuptools", [*_PIP_INSTALL, "--require-hashes", *_TOOLS]):
        return _failed()
    by_pip = "1/4 packages and the default model, by pip (a few minutes)"
    if not (_install_packages_with_uv(settings) or _run(by_pip, [*_PIP_INSTALL, *_LOCKED, *_PACKAGES])):
        return _failed()
    project = [*_PIP_INSTALL, "--no-deps", "--no-build-isolation", "--editable", "."]
    if not (_install_torch(settings) and _run("3/4 this project", project)):
        return _failed()
    # Otherwise the first run would wait for both.  Where the kernels cannot be compiled, `tlt doctor` says why.
    first_use = "from kernels import native; native.library(); import flows._announcement, flows.train, reasoning_gym"
    # Container images often forbid byte code, and every start would compile 6,000 files again.
    writing = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    _run("4/4 the CPU's kernels and Python's own byte code are compiled", [sys.executable, "-c", first_use], writing)
    print(f"installed in {time.monotonic() - began_s:.0f} s", flush=True)
    return 0


def _install_packages_with_uv(settings: dict[str, str]) -> bool:
    if "no-index" in settings:
        return False
    environment = dict(os.environ)
    for variable, setting in (("UV_DEFAULT_INDEX", "index-url"), ("SSL_CERT_FILE", "cert")):
        if setting in settings:
            environment.setdefault(variable, settings[setting])
    done = _run("1/4 packages and the default model, by uv", [*_UV_INSTALL, *_LOCKED, *_PACKAGES], environment)
    if not done:
        print(f"    uv failed: {_last_line()}\n    pip installs them, which takes a few minutes", flush=True)
    return done


def _install_torch(settings: dict[str, str]) -> bool:
    """Without a GPU, uv finds the CPU wheel; the default index's wheel would add gigabytes of CUDA."""
    title = f"2/4 {_TORCH}"
    wanted = ["--constraint", "constraints.txt", _TORCH]
    chosen = {"find-links", "index-url", "extra-index-url", "no-index"} & settings.keys()
    if sys.platform == "linux" and not _has_gpu() and not chosen:
        if _run(f"{title} for a CPU", [*_UV_INSTALL, "--torch-backend", "cpu", *wanted]):
            return True
        print("    not available: pip takes the index's wheel, which may add gigabytes of CUDA", flush=True)
    return _run(title, [*_PIP_INSTALL, *wanted])


def _has_gpu() -> bool:
    return shutil.which("nvidia-smi") is not None or Path("/dev/nvidiactl").exists()


def _pip_settings() -> dict[str, str]:
    """pip's settings by name, from files and variables.  uv does not read them."""
    told = subprocess.run([*_PIP, "config", "list"], capture_output=True, text=True, check=False).stdout
    settings = {}
    for line in told.splitlines():
        key, _, value = line.partition("=")
        settings[key.rpartition(".")[2]] = value.strip().strip("'\"")
    return settings


def _run(title: str, command: Sequence[str], environment: dict[str, str] | None = None) -> bool:
    """Whether the command succeeded.  While it runs, its newest line of output is printed from time to time."""
    print(f"  {title} ...", flush=True)
    began_s = said_s = time.monotonic()
    with _LOG.open("ab") as log:
        log.write(f"$ {' '.join(command)}\n".encode())
        log.flush()
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment)
        while process.poll() is None:
            time.sleep(0.1)
            if time.monotonic() - said_s > _QUIET_S:
                said_s = time.monotonic()
                print(f"    {said_s - began_s:.0f} s so far: {_last_line()}", flush=True)
    if process.returncode == 0:
        print(f"    done in {time.monotonic() - began_s:.0f} s", flush=True)
    return process.returncode == 0


def _last_line() -> str:
    lines = (line.strip() for line in reversed(_LOG.read_text(errors="replace").splitlines()))
    return next((line[:90] for line in lines if line and not line.startswith(("WARNING", "$"))), "")


def _failed() -> int:
    print("\n".join(_LOG.read_text(errors="replace").splitlines()[-20:]), file=sys.stderr)
    print(f"the installation failed; the full output is in {_LOG}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
