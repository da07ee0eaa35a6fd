"""The demo's figures are held against those of the report that is replaced."""

import math
from typing import Any

import pytest

from bench.one_run import changes

CPU = "Some CPU, family 6"
KNOWN = {"total s": 400.0, "mean reward": 0.5, "acceptance length": 2.2, "start s": 0.1}
BEFORE: dict[str, Any] = {
    "commit": "0123456789abcdef",
    "machine": {"cpu": CPU},
    "rows": [{"configuration": "demo", **{name: {"median": value} for name, value in KNOWN.items()}}],
}


def test_what_has_not_changed_holds() -> None:
    found = changes(BEFORE, KNOWN, CPU)
    assert len(found) == 6
    assert all(one["holds"] for one in found)


@pytest.mark.parametrize("name", ["total s", "mean reward", "acceptance length"])
@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_change_in_either_direction_is_missed(name: str, factor: float) -> None:
    missed = [one["claim"] for one in changes(BEFORE, KNOWN | {name: factor * KNOWN[name]}, CPU) if not one["holds"]]
    assert missed == [f"{name} over that of 012345678: {'at least' if factor < 1 else 'at most'}"]


def test_another_processor_has_another_history() -> None:
    assert changes(BEFORE, KNOWN, "Another CPU") == changes(None, KNOWN, CPU) == []


def test_a_figure_that_is_not_a_number_is_an_error() -> None:
    with pytest.raises(ValueError, match="mean reward: not a number"):
        changes(BEFORE, KNOWN | {"mean reward": math.nan}, CPU)
