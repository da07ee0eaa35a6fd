"""Reports that a script can judge: a verdict compares the median with its bound, and the bound itself holds."""

import pytest

from bench.verdicts import verdict


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
