"""What a newcomer reads first is short, and agrees with what is checked.

The claims: the README has at most 130 lines; the files of the reading order exist and have under 200; the rooms in
CONTRIBUTING.md are the layers contract's, in its order; every file that a page names exists, and so do the types and
methods on the two ways of docs/architecture.md; the glossary is small, and its words are used.
"""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README, CONTRIBUTING, GLOSSARY = ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "docs" / "glossary.md"
NAMED = re.compile(r"`((?:bench|conf|docs|flows|kernels|tasks|tests|tlt_core|tlt_vllm)/[\w./-]*)`")


def section(page: Path, heading: str) -> str:
    return page.read_text(encoding="utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]


def test_the_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 130


def test_the_reading_order_is_eight_short_files() -> None:
    named = re.findall(r"^\| `(\S+)` \|", section(ROOT / "docs" / "architecture.md", "Reading order"), re.MULTILINE)
    assert len(named) == 8
    for name in named:
        assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) < 200, name


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


def test_types_and_verbs_of_the_two_ways_exist() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tlt_core").rglob("*.py"))
    ways = [section(ROOT / "docs" / "architecture.md", f"The way of a {what}") for what in ("prompt", "hidden state")]
    types = {name for way in ways for name in re.findall(r"\b[A-Z][a-z]+(?:[A-Z][a-z]+)+\b", way)}
    verbs = ("sample_step", "sample", "run_phase", "serve_requests", "decode", "publish_drafter")
    assert {"GenerationRequest", "HiddenStates", "TrainSequence"} <= types
    for name in types:
        assert re.search(rf"^class {name}\b", sources, re.MULTILINE), name
    for verb in verbs:
        assert verb in "".join(ways)
        assert f"def {verb}(" in sources, verb
    for room, file in re.findall(r"^(\w+)/(\w+) ", ways[0], re.MULTILINE):
        assert (ROOT / "tlt_core" / room / f"{file}.py").is_file(), file


def test_the_glossary_is_small_and_its_words_are_used() -> None:
    words = re.findall(r"^\| \*\*(.+?)\*\* \|", GLOSSARY.read_text(encoding="utf-8"), re.MULTILINE)
    assert 5 <= len(words) <= 20
    assert words == sorted(words)
    sources = "".join(
        path.read_text(encoding="utf-8").lower()
        for room in ("bench", "conf", "flows", "tasks", "tlt_core", "kernels")
        for path in (ROOT / room).rglob("*.py")
    )
    for word in words:
        assert word in sources, word
