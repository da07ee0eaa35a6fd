"""Where a run is, in words, and how long it still takes."""

import pytest

from tlt_core.run.progress import PhaseClock, Progress, minutes


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (21, "0:21"), (725.2, "12:05"), (3725, "1:02:05")])
def test_minutes(seconds: float, text: str) -> None:
    assert minutes(seconds) == text


def test_a_counted_phase_goes_on_at_its_rate() -> None:
    clock = PhaseClock()
    assert clock.left_s(0.0) is None
    clock.show(Progress(None, 0, "cold start", 0, 10), 100.0)
    assert clock.left_s(104.0) is None
    clock.show(Progress(None, 0, "cold start", 2, 10), 106.0)
    assert clock.left_s(106.0) == 24.0  # 3 s each


def test_a_phase_that_was_there_before_takes_as_long_again() -> None:
    clock = PhaseClock()
    clock.show(Progress(1, 2, "rollout", 90, 96), 0.0)
    clock.show(Progress(1, 2, "update", 0, 1), 30.0)
    assert clock.left_s(35.0) is None  # nothing is counted, and it was not there before
    clock.show(Progress(2, 2, "rollout", 90, 96), 38.0)
    assert clock.left_s(48.0) == 20.0  # the first took 30, however few are missing
    assert clock.left_s(70.0) == pytest.approx(32 * 6 / 90)  # longer than then: its own rate
    clock.show(Progress(2, 2, "update", 0, 1), 80.0)
    assert (clock.left_s(82.0), clock.left_s(89.0)) == (6.0, None)
