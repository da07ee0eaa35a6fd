"""How a step's wall time splits, and acceptance figures against numbers counted by hand."""

import pytest

from tlt_core.cluster.messages import GenerateReport
from tlt_core.items.speculation import OFF, RoundReport, Strategy
from tlt_core.items.types import WorkerSpan, WorkerState
from tlt_core.rollout.engine import RoundTrace
from tlt_core.run.step_metrics import spec_metrics, time_metrics

CHAIN = Strategy("ngram", 3, 1, 3)


def _span(worker: int, start_s: float, end_s: float, state: WorkerState = WorkerState.BUSY) -> WorkerSpan:
    return WorkerSpan(worker, state, start_s, end_s)


def test_overhead_is_what_no_phase_explains() -> None:
    # covered: 0 to 30, of which worker 1 had a part, and 31 to 38
    spans = [_span(0, 0.0, 30.0), _span(1, 0.0, 29.0), _span(1, 12.5, 14.0), _span(0, 31.0, 38.0, WorkerState.UPDATING)]
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


def _trace(strategy: Strategy, numbers: list[int], offered: list[int], accepted: list[int]) -> RoundTrace:
    report = RoundReport(strategy, len(numbers), 10, tuple(offered), tuple(offered), tuple(accepted), 0.01, 0.03)
    return RoundTrace(report, tuple(numbers), len(numbers) + sum(accepted), 100.0, 0.04)


def test_speculation_by_hand() -> None:
    rounds = (
        _trace(OFF, [0, 1], [0, 0], [0, 0]),
        _trace(CHAIN, [0, 1], [3, 3], [3, 0]),
        _trace(CHAIN, [0], [2], [1]),
    )
    other = (_trace(OFF, [0], [0], [0]),)
    reports = [GenerateReport(rounds, {"speedup_est": 1.5}, 2), GenerateReport(other, {"speedup_est": 0.5}, 0)]
    assert spec_metrics(reports) == pytest.approx(
        {
            "rollout/spec_accept_length": (4 + 1 + 2) / 3,
            "rollout/spec_accept_length_requests": ((4 + 2) / 2 + 1) / 2,
            "rollout/spec_accept_rate": 4 / 8,
            "rollout/spec_accept_rate_pos_1": 2 / 3,
            "rollout/spec_accept_rate_pos_2": 1 / 2,  # two drafts got as far as depth 1
            "rollout/spec_accept_rate_pos_3": 1 / 1,
            "rollout/spec_active_frac": 2 / 4,
            "rollout/spec_speedup_est": 1.0,
            "rollout/spec_drafter_failures": 2,
        }
    )
    assert spec_metrics([GenerateReport(other, {}, 0)]) == {}
