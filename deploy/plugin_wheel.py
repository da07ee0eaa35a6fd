"""What `make plugin-wheel` does: a wheel with the vLLM plug-in alone, for somebody's vLLM environment.

    tlt_vllm/*.py + modules of this project that it imports, there tlt_vllm/_own/..  -->  OUT/tlt_vllm-*.whl

Its one top-level name is tlt_vllm.  It needs torch and safetensors, which vLLM brings.  Remove the whole project (pip
uninstall tlt) before it is installed: both have that name.
"""

import argparse
import ast
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_PLUGIN, _INSIDE = "tlt_vllm", "tlt_vllm._own"
_MOVED = ("tlt_core", "kernels")
_IMPORT = re.compile(rf"^(\s*)(from|import) ({'|'.join(_MOVED)})(?=[.\s])", re.MULTILINE)
_PROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "tlt-vllm"
version = "{version}"
description = "Adaptive draft lengths, n-grams beside EAGLE-3 and exact sampling for vLLM"
requires-python = "{python}"
license = "Apache-2.0"

[project.entry-points."vllm.general_plugins"]
tlt = "tlt_vllm.plugin:register"

[tool.setuptools.packages.find]
include = ["tlt_vllm*"]

[tool.setuptools.package-data]
"tlt_vllm._own.kernels.native" = ["*.c", "*.h"]
"""


def build(out: Path) -> Path:
    """The wheel, in this folder."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    with tempfile.TemporaryDirectory() as parent:
        room = Path(parent) / "source"
        for file in _needed():
            target = room / _PLUGIN / "_own" / file if file.parts[0] in _MOVED else room / file
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(_renamed((ROOT / file).read_text()))
        (room / _PLUGIN / "_own" / "__init__.py").write_text('"""Parts of TLT that the plug-in needs."""\n')
        for source in sorted((ROOT / "kernels" / "native").glob("*.[ch]")):
            shutil.copy(source, room / _PLUGIN / "_own" / "kernels" / "native")
        shutil.copy(ROOT / "LICENSE", room)
        text = _PROJECT.format(version=project["version"], python=project["requires-python"])
        (room / "pyproject.toml").write_text(text)
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(out), str(room)]
        subprocess.run(command, check=True)
    return max(out.glob("tlt_vllm-*.whl"), key=lambda path: path.stat().st_mtime_ns)


def _needed() -> set[Path]:
    """Files of the plug-in, and of the project's modules that it imports."""
    found: set[Path] = set()
    waiting = [path.relative_to(ROOT) for path in (ROOT / _PLUGIN).glob("*.py")]
    while waiting:
        file = waiting.pop()
        if file not in found:
            found.add(file)
            waiting += [path for name in _imports(file) for path in _files(name)]
    return found


def _imports(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _files(name: str) -> Iterator[Path]:
    """Of a module of ours and the packages around it; of other names none."""
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        path = Path(*parts[:count])
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if parts[0] in _MOVED and (ROOT / file).is_file():
                yield file


def _renamed(text: str) -> str:
    return _IMPORT.sub(rf"\1\2 {_INSIDE}.\3", text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    print(build(parser.parse_args().out))
