"""Rows and verdicts of the engines' benchmark, by hand; what is left out says why."""

from bench.engines.command import (
    verdicts_of,
)
from bench.engines.measure import Case, Contest, Measured

ONE, TWO = Case(1, 0.0), Case(2, 0.0)


def runs(*rates, tokens=((7,),)):
    return [Measured(rate, rate / 2, [list(row) for row in tokens]) for rate in rates]


def contest(**by_name):
    measured = {
        (name.replace("_", " "), case): found for name, cases in by_name.items() for case, found in cases.items()
    }
    return Contest(measured, {name: {"version": "1", "threads": 1} for name, _ in measured}, {})


def test_plain_is_judged_against_the_faster_variant_of_each_rival_in_the_same_repeat():
    found = contest(
        plain={ONE: runs(60.0, 50.0, 70.0), Case(8, 0.0): runs(1.0)},
        vllm={ONE: runs(50.0, 50.0, 50.0), Case(8, 0.0): runs(9.0)},  # eight are not judged
        vllm_eager={ONE: runs(40.0, 60.0, 40.0)},
        transformers={ONE: runs(59.0, 59.0, 59.0)},
    )
    faster, slower = verdicts_of(found)
    assert faster == {
        "claim": "plain over vllm, 1 live, temperature 0",
        "value": 1.2,
        "spread": [1.0, 1.4],
        "bound": 1.2,
        "holds": True,
    }
    assert slower["claim"].startswith("plain over transformers")
    assert (slower["value"], slower["holds"]) == (60 / 59, False)
