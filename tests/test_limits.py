"""Limits on the size of files, functions, classes and rooms: each can be taken in at once."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("bench", "conf", "deploy", "flows", "kernels", "tasks", "tlt_core", "tlt_vllm")
MOST_FILE_LINES, MOST_FUNCTION_LINES, MOST_PUBLIC_METHODS, MOST_ROOMS = 350, 60, 15, 18
SOURCES = sorted(
    path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.suffix in (".py", ".c", ".h")
)
# A C function: a line at the margin that opens a body, up to the closing brace at the margin.
C_FUNCTION = re.compile(r"^(?!typedef|struct|enum|#|//)[^\n;=]*?(\w+)\((?:[^;{}])*\{$.*?^\}", re.DOTALL | re.MULTILINE)


def too_long(source: str, suffix: str) -> Iterator[str]:
    """What exceeds a limit in a file, in words."""
    lines = source.count("\n")
    if lines > MOST_FILE_LINES:
        yield f"{lines} lines"
    for name, length in python_functions(source) if suffix == ".py" else c_functions(source):
        if length > MOST_FUNCTION_LINES:
            yield f"{name}: {length} lines"
    for name, methods in public_methods(source) if suffix == ".py" else ():
        if methods > MOST_PUBLIC_METHODS:
            yield f"class {name}: {methods} public methods"


def python_functions(source: str) -> Iterator[tuple[str, int]]:
    """Names of all functions, and their lines from `def` (or the first decorator) to the last."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            yield node.name, (node.end_lineno or first) - first + 1


def c_functions(source: str) -> Iterator[tuple[str, int]]:
    """The same of C, in the project's layout."""
    for found in C_FUNCTION.finditer(source):
        yield found[1], found[0].count("\n") + 1


def public_methods(source: str) -> Iterator[tuple[str, int]]:
    """Names of all classes, with the number of their public methods; properties count."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            methods = {n.name for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
            yield node.name, sum(not name.startswith("_") for name in methods)


def test_no_file_function_or_class_is_too_large() -> None:
    found = {str(path.relative_to(ROOT)): list(too_long(path.read_text(), path.suffix)) for path in SOURCES}
    assert {path: faults for path, faults in found.items() if faults} == {}


def test_the_project_has_few_rooms() -> None:
    inside = {path.relative_to(ROOT).parts[1] for path in SOURCES if path.is_relative_to(ROOT / "tlt_core")}
    rooms = (inside - {"__init__.py"}) | (set(PACKAGES) - {"tlt_core", "deploy"})
    assert len(rooms) <= MOST_ROOMS, sorted(rooms)
    assert not [room for room in rooms if room.endswith(".py")], "every file of tlt_core is in a room"
