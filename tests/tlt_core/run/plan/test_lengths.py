"""Lengths from a file, and drawn."""

import math
import statistics
from pathlib import Path

import pytest

from tlt_core.run.plan.errors import PlanError
from tlt_core.run.plan.lengths import STEPS, drawn, read


def test_drawn_lengths_are_log_normal_cut_and_alike_within_a_prompt() -> None:
    steps = drawn("median=1000,sigma=1.0,cap=8000", prompts=200, samples=4)
    assert len(steps) == STEPS
    groups = [group.lengths for groups in steps for group in groups]
    lengths = [n for group in groups for n in group]
    assert statistics.median(lengths) == pytest.approx(1000, rel=0.05)
    assert max(lengths) == 8000
    assert sum(n == 8000 for n in lengths) / len(lengths) == pytest.approx(0.019, abs=0.006)  # P(z > ln 8)
    logs = [[math.log(n) for n in group] for group in groups]
    pairs = [(group[0], group[1]) for group in logs]
    assert statistics.correlation(*zip(*pairs, strict=True)) == pytest.approx(0.5, abs=0.08)
    assert drawn("median=1000,sigma=1.0,cap=8000", prompts=200, samples=4) == steps, "no other step the next time"


@pytest.mark.parametrize("spec", ["median=1000", "median=0,sigma=1,cap=10", "median=a,sigma=1,cap=2", "here.jsonl", ""])
def test_what_is_neither_file_nor_parameters_is_refused(spec: str) -> None:
    with pytest.raises(PlanError, match=r"name a file, or write such as median=1500,sigma=1.0,cap=16384"):
        drawn(spec, prompts=2, samples=2)


def test_a_file_gives_a_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "lengths.jsonl"
    path.write_text("[5, 7]\n\n[9, 2]\n[1, 1]\n[4, 4]\n[8]\n")
    assert [[group.lengths for group in groups] for groups in read(path, prompts=2)] == [
        [(5, 7), (9, 2)],
        [(1, 1), (4, 4)],
    ], "the rest is no whole step"
    with pytest.raises(PlanError, match="has 5 prompts, a step 32: set --prompts"):
        read(path, prompts=32)


@pytest.mark.parametrize("line", ["[]", "[1.5]", "[true]", "[0]", '{"a": 1}', "512", "[", "[" * 100_000])
def test_a_wrong_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "lengths.jsonl"
    path.write_text(f"[3]\n{line}\n")
    with pytest.raises(PlanError, match=r"lengths\.jsonl, line 2: write the lengths"):
        read(path, prompts=1)
