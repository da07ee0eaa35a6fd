"""How a step's wall time splits."""

import pytest

from tlt_core.items.types import WorkerSpan, WorkerState
from tlt_core.run.step_metrics import covered_s, time_metrics


def _span(worker: int, start_s: float, end_s: float, state: WorkerState = WorkerState.BUSY) -> WorkerSpan:
    return WorkerSpan(worker, state, start_s, end_s)


def test_covered_time_counts_overlaps_once_and_leaves_gaps_out() -> None:
    spans = [_span(1, 12.0, 15.0), _span(0, 10.0, 13.0), _span(0, 20.0, 21.0), _span(1, 12.5, 14.0)]
    assert covered_s(spans) == pytest.approx(5.0 + 1.0)


def test_overhead_is_what_no_phase_explains() -> None:
    spans = [_span(0, 0.0, 30.0), _span(1, 0.0, 29.0), _span(0, 31.0, 38.0, WorkerState.UPDATING)]
    values = {
        "timing_s/gen": 30.5,  # the half second before the workers are busy is overhead
        "timing_s/reward": 0.5,
        "timing_s/update_actor": 7.2,
        "timing_s/save_checkpoint": 1.0,
        "timing_s/tracking": 0.3,  # MLflow is overhead
    }
    metrics = time_metrics(values, spans, step_s=40.0)
    assert metrics["timing_s/overhead"] == pytest.approx(40.0 - 37.0 - 0.5 - 1.0)
    assert metrics["perf/overhead_share"] == pytest.approx(1.5 / 40.0)
    assert metrics["perf/rollout_share"] == pytest.approx(30.5 / 40.0)
