"""Metrics are declared once: the document, the code and the declaration agree."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tlt_core.items.metrics import SECTIONS, declaration, page

ROOT = Path(__file__).parents[3]
DECLARED = [metric for section in SECTIONS for metric in section.metrics]
FAMILIES = {name.partition("/")[0] for name in (metric.name for metric in DECLARED)}
NAME = re.compile(rf"({'|'.join(FAMILIES)})/[\w/*-]*[a-z0-9*]")
NOT_TRACKED = {"coldstart/loss", "coldstart/grad_norm", "coldstart/lr"}  # of one step; the cold start sums up


def _literals() -> Iterator[tuple[Path, str]]:
    """Metric names in the source; `*` stands for what an f-string fills in."""
    for path in sorted(p for folder in ("tlt_core", "tasks", "flows") for p in (ROOT / folder).rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        parts = {part for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in (node for node in nodes if node not in parts):
            text = ""
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = node.value
            elif isinstance(node, ast.JoinedStr):
                text = "".join(part.value if isinstance(part, ast.Constant) else "*" for part in node.values)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "timed":
                text = f"timing_s/{ast.literal_eval(node.args[0])}"
            if NAME.fullmatch(text):
                yield path.relative_to(ROOT), text


def _pattern(literal: str) -> re.Pattern[str]:
    return re.compile("[^/]+".join(map(re.escape, literal.split("*"))))


def test_the_document_is_what_is_declared() -> None:
    hint = "run: python -m tlt_core.items.metrics > docs/metrics.md"
    assert (ROOT / "docs" / "metrics.md").read_text() == page(), hint


def test_every_name_in_the_source_is_declared() -> None:
    made = [metric.name.replace("{", "").replace("}", "") for metric in DECLARED]  # a name that the placeholder allows
    unknown = [
        (str(path), name)
        for path, name in _literals()
        if name not in NOT_TRACKED
        and declaration(name) is None
        and not any(_pattern(name).fullmatch(one) for one in made)
    ]
    assert not unknown


def test_every_declared_metric_is_made_somewhere() -> None:
    found = [_pattern(name) for _, name in _literals() if name.count("*") < len(name.split("/"))]
    made_of_parts = ("took/", "reward/num_", "val-core/")  # names put together from several words
    for metric in DECLARED:
        name = metric.name.replace("{", "").replace("}", "")
        assert name.startswith(made_of_parts) or any(pattern.fullmatch(name) for pattern in found), metric.name
