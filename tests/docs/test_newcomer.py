"""What a newcomer reads first is short, and agrees with what is checked.

The claims: the README has at most 130 lines; the rooms in CONTRIBUTING.md are the layers contract's, in its order;
every file that a page names exists.
"""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README, CONTRIBUTING = ROOT / "README.md", ROOT / "CONTRIBUTING.md"
NAMED = re.compile(r"`((?:bench|conf|docs|flows|kernels|tasks|tests|tlt_core|tlt_vllm)/[\w./-]*)`")


def section(page: Path, heading: str) -> str:
    return page.read_text(encoding="utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]


def test_the_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 130


def test_the_rooms_are_those_of_the_contract() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = [c["layers"] for c in contracts if c.get("containers") == ["tlt_core"]]
    rows = re.findall(r"^\| (`[\w`, ]+`) \| ", section(CONTRIBUTING, "How the code is laid out"), re.MULTILINE)
    told = [set(re.findall(r"\w+", row)) for row in rows]
    assert told == [set(layer.replace("|", " ").split()) for layer in layers]


@pytest.mark.parametrize("page", [README, CONTRIBUTING, *sorted((ROOT / "docs").glob("*.md"))], ids=lambda p: p.name)
def test_named_files_exist(page: Path) -> None:
    for name in NAMED.findall(page.read_text(encoding="utf-8")):
        assert (ROOT / name).exists() or any(ROOT.glob(name)), name
