"""Reports that a script can judge."""

import json
from pathlib import Path

import pytest

from bench.report import Bound, judge, write_report
from bench.verdicts import summarise


def test_figures_are_summarised_by_median_and_range() -> None:
    steps = [{"a": 3.0}, {"a": 1.0}, {"a": 8.0, "save": 6.0}]
    assert summarise(steps, ["a", "save"]) == {
        "a": {"median": 3.0, "min": 1.0, "max": 8.0},
        "save": {"median": 0.0, "min": 0.0, "max": 6.0},
    }


@pytest.mark.parametrize(
    ("values", "at_least", "holds"), [((0.6, 0.71, 0.9), True, True), ((0.6, 0.69, 0.9), True, False)]
)
def test_a_verdict_compares_the_median(values: tuple[float, ...], at_least: bool, holds: bool) -> None:
    (verdict,) = judge([{"share": v} for v in values], [Bound("rollout dominates", "share", 0.7, at_least)])
    assert verdict == {
        "claim": "rollout dominates",
        "value": values[1],
        "spread": [0.6, 0.9],
        "bound": 0.7,
        "holds": holds,
    }


def test_an_upper_bound_itself_does_not_hold() -> None:
    (verdict,) = judge([{"overhead": 0.03}], [Bound("less than 3 %", "overhead", 0.03, at_least=False)])
    assert verdict["holds"] is False


def test_a_report_says_what_where_and_how(tmp_path: Path) -> None:
    path = tmp_path / "reports" / "step.json"
    report = write_report(path, command="tlt bench step", repeats=3, rows=[{"configuration": "x"}], verdicts=[])
    assert json.loads(path.read_text()) == report
    assert report["name"] == "step"
    assert report["command"] == "tlt bench step"
    assert {"cores", "threads", "gpus", "versions"} <= report["machine"].keys()
    assert report["commit"]
