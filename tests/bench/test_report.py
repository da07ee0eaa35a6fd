"""Reports that a script can judge: a verdict compares the median with its bound, and the bound itself holds."""

import json
from pathlib import Path

import pytest

from bench.report import write_report
from bench.verdicts import summarise, verdict


def test_figures_are_summarised_by_median_and_range() -> None:
    steps = [{"a": 3.0}, {"a": 1.0}, {"a": 8.0, "save": 6.0}]
    assert summarise(steps, ["a", "save"]) == {
        "a": {"median": 3.0, "min": 1.0, "max": 8.0},
        "save": {"median": 0.0, "min": 0.0, "max": 6.0},
    }


@pytest.mark.parametrize(
    ("values", "bound", "at_most", "holds"),
    [
        ([0.9, 0.97, 1.0], 0.97, False, True),
        ([0.9, 0.969, 1.0], 0.97, False, False),
        ([90, 100, 300], 100, True, True),
        ([90, 101, 300], 100, True, False),
    ],
)
def test_a_verdict_compares_the_median(values: list[float], bound: float, at_most: bool, holds: bool) -> None:
    found = {"claim": "x", "value": values[1], "spread": [values[0], values[2]], "bound": bound, "holds": holds}
    assert verdict("x", values, bound, at_most=at_most) == found


def test_a_report_says_what_where_and_how(tmp_path: Path) -> None:
    path = tmp_path / "reports" / "step.json"
    report = write_report(path, command="tlt bench step", repeats=3, rows=[{"configuration": "x"}], verdicts=[])
    assert json.loads(path.read_text()) == report
    assert (report["name"], report["command"], report["repeats"]) == ("step", "tlt bench step", 3)
    assert {"cores", "threads", "gpus", "versions"} <= report["machine"].keys()
    assert report["commit"]
