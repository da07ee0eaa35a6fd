"""What a tuner knows of the cost to come back to a drafter."""

import json

import pytest

from tlt_core.speculation import OFF, RoundReport, Strategy
from tlt_core.tuner.backlog import Backlog

ARM = Strategy("eagle3", 4, 1, 4)


def play(subject: Backlog, strategy: Strategy, rows: list[int], *, accepted: int = 0, backlog_s: float = 0.0) -> None:
    """One round."""
    drafted = (strategy.tokens,) * len(rows)
    report = RoundReport(
        strategy, len(rows), 100, drafted, drafted, (accepted,) * len(rows), 0.0, 0.01, backlog_s=backlog_s
    )
    subject.observe(rows, report)


def behind(pace_s: float) -> Backlog:
    """Rows 0 and 1 were decoded 10 tokens without, and have caught up."""
    subject = Backlog(["eagle3", "ngram"])
    for _ in range(10):
        play(subject, OFF, [0, 1])
    assert subject.seconds("eagle3", [0, 1]) == 0.0, "nothing is known yet"
    play(subject, ARM, [0, 1], accepted=2, backlog_s=20 * pace_s)
    return subject


def test_tokens_decoded_without_it_are_what_it_has_to_catch_up_with() -> None:
    subject = behind(0.001)
    assert subject.seconds("eagle3", [0, 1]) == 0.0
    for _ in range(7):
        play(subject, OFF, [0, 1, 2])
    assert subject.seconds("eagle3", [0, 1, 2]) == pytest.approx(0.021)
    assert subject.seconds("eagle3", [2]) == pytest.approx(0.007)
    subject.forget(1)
    assert subject.seconds("eagle3", [0, 1, 2]) == pytest.approx(0.014)
    play(subject, Strategy("ngram", 3, 1, 3), [0], accepted=3)  # another drafter's tokens count, too
    assert subject.seconds("eagle3", [0]) == pytest.approx(0.011)


def test_the_pace_follows_what_returns_take() -> None:
    subject = behind(0.001)
    for _ in range(20):
        for _ in range(10):
            play(subject, OFF, [0, 1])
        play(subject, ARM, [0, 1], backlog_s=20 * 0.003)
    for _ in range(10):
        play(subject, OFF, [0])
    assert subject.seconds("eagle3", [0]) == pytest.approx(0.03, rel=0.01)


def test_a_return_after_a_few_tokens_does_not_tell_the_pace() -> None:
    """Of a prompt's time, most of all."""
    subject = behind(0.001)
    play(subject, OFF, [0, 1])
    play(subject, ARM, [0, 1], backlog_s=1.0)
    play(subject, OFF, [0, 1])
    assert subject.seconds("eagle3", [0, 1]) == pytest.approx(0.002)


def test_it_goes_on_after_a_restart() -> None:
    subject, again = behind(0.001), Backlog(["eagle3"])
    play(subject, OFF, [0, 1])
    again.load_state_dict(json.loads(json.dumps(subject.state_dict())))
    for one in (subject, again):
        play(one, OFF, [0, 1])
        assert one.seconds("eagle3", [0, 1]) == pytest.approx(0.004)
