"""Where a run is, and how long it still takes."""

import pytest

from tlt_core.run.progress import PhaseClock, Progress, minutes


def test_minutes() -> None:
    assert [minutes(seconds) for seconds in (0.4, 21, 725.2, 3725)] == ["0:00", "0:21", "12:05", "1:02:05"]


def test_a_phase_that_was_there_before_takes_as_long_again() -> None:
    clock = PhaseClock()
    assert clock.left_s(0.0) is None
    clock.show(Progress(1, 2, "rollout", 0, 96), 0.0)
    assert clock.left_s(4.0) is None
    clock.show(Progress(1, 2, "rollout", 1, 96), 6.0)
    assert clock.left_s(6.0) is None  # one response tells nothing
    clock.show(Progress(1, 2, "rollout", 24, 96), 8.0)
    assert clock.left_s(8.0) == 24.0  # a new phase goes on at its rate
    clock.show(Progress(1, 2, "update", 0, 1), 30.0)
    assert clock.left_s(35.0) is None  # nothing is counted, and it was not there before
    clock.show(Progress(2, 2, "rollout", 90, 96), 38.0)
    assert clock.left_s(48.0) == 20.0  # the first took 30, however few are missing
    assert clock.left_s(70.0) == pytest.approx(32 * 6 / 90)  # longer than then: its own rate
    clock.show(Progress(2, 2, "update", 0, 1), 80.0)
    assert (clock.left_s(82.0), clock.left_s(89.0)) == (6.0, None)
