"""What the driver learns from a rollout phase about the worth of training."""

import pytest

from tlt_core.items.speculation import RoundReport, Strategy
from tlt_core.items.types import WorkerSpan, WorkerState
from tlt_core.rollout.engine import RoundTrace
from tlt_core.run.drafter_release import outcome_of
from tlt_core.spot.coordinator import PhaseReport


def _round(drafter: str, end_s: float, seconds: float) -> RoundTrace:
    report = RoundReport(Strategy(drafter, 4, 1, 4), 1, 100, (4,), (4,), (2,), 0.0, seconds)
    return RoundTrace(report, (0,), 3, end_s, seconds)


def test_only_rounds_beside_an_idle_worker_say_how_much_the_drafter_is_used() -> None:
    """Worker 1 is idle from 4 s on, trains from 5 to 9 s, then computes a pass; worker 0 ends at 10 s."""
    spans = (
        WorkerSpan(0, WorkerState.BUSY, 0.0, 10.0),
        WorkerSpan(1, WorkerState.BUSY, 0.0, 4.0),
        WorkerSpan(1, WorkerState.IDLE, 4.0, 5.0),
        WorkerSpan(1, WorkerState.TRAINING, 5.0, 9.0),
        WorkerSpan(1, WorkerState.STREAMING, 9.0, 10.5),
    )
    rounds = [[_round("eagle3", 3.0, 3.0), _round("ngram", 6.0, 1.0), _round("eagle3", 9.0, 3.0)], []]
    outcome = outcome_of(PhaseReport(spans, 10.0, (), 0, {}), rounds, [])
    assert outcome.used_share == pytest.approx(0.75)
    assert (outcome.trained_s, outcome.trained_worker_s, outcome.idle_s) == (4.0, 4.0, 5.0)
    early = outcome_of(PhaseReport(spans[:1], 10.0, (), 0, {}), rounds, [])
    assert early.used_share is None
