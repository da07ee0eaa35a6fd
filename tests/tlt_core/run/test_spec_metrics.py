"""Acceptance figures against numbers counted by hand."""

import pytest

from tlt_core.cluster.messages import GenerateReport
from tlt_core.items.speculation import OFF, RoundReport, Strategy
from tlt_core.rollout.engine import RoundTrace
from tlt_core.run.step_metrics import spec_metrics

CHAIN = Strategy("ngram", 3, 1, 3)


def trace(strategy, numbers, offered, accepted):
    report = RoundReport(strategy, len(numbers), 10, tuple(offered), tuple(offered), tuple(accepted), 0.01, 0.03)
    return RoundTrace(report, tuple(numbers), len(numbers) + sum(accepted), 100.0, 0.04)


def test_figures_by_hand():
    rounds = (
        trace(OFF, [0, 1], [0, 0], [0, 0]),
        trace(CHAIN, [0, 1], [3, 3], [3, 0]),
        trace(CHAIN, [0], [2], [1]),
    )
    other = (trace(OFF, [0], [0], [0]),)
    reports = [
        GenerateReport(rounds, {"speedup_est": 1.5}, 2),
        GenerateReport(other, {"speedup_est": 0.5}, 0),
    ]
    metrics = spec_metrics(reports)
    assert metrics["rollout/spec_accept_length"] == pytest.approx((4 + 1 + 2) / 3)
    assert metrics["rollout/spec_accept_length_requests"] == pytest.approx(((4 + 2) / 2 + 1) / 2)
    assert metrics["rollout/spec_accept_rate"] == pytest.approx(4 / 8)
    assert metrics["rollout/spec_accept_rate_pos_1"] == pytest.approx(2 / 3)
    assert metrics["rollout/spec_accept_rate_pos_2"] == pytest.approx(1 / 2)  # two drafts got as far as depth 1
    assert metrics["rollout/spec_accept_rate_pos_3"] == pytest.approx(1 / 1)
    assert metrics["rollout/spec_active_frac"] == pytest.approx(2 / 4)
    assert metrics["rollout/spec_speedup_est"] == pytest.approx(1.0)
    assert metrics["rollout/spec_drafter_failures"] == 2


def test_nothing_to_say_without_speculation():
    assert spec_metrics([GenerateReport((trace(OFF, [0], [0], [0]),), {}, 0)]) == {}
