"""The tuner's benchmark: what is compared with what, and when a tuner has recovered."""

from bench.tuner.simulator import Hits
from bench.tuner.workloads import NEVER, POLICIES, SimulatedWork, best_fixed, earnings, recovery
from tlt_core.items.speculation import Strategy

STRATEGIES = (Strategy("eagle3", 4, 1, 4), Strategy("ngram", 4, 1, 4))


def test_every_policy_and_every_strategy_is_played_on_the_same_requests():
    work = SimulatedWork(Hits(0.8), Hits(0.0), 2, 100)
    earned = earnings(work, STRATEGIES, seed=1)
    assert list(earned) == [*POLICIES, "fixed eagle3:4x1/4", "fixed ngram:4x1/4"]
    assert best_fixed(earned) == earned["fixed eagle3:4x1/4"] == earned["threshold"]
    assert earned == earnings(work, STRATEGIES, seed=1)
    assert earned != earnings(work, STRATEGIES, seed=2)


def test_recovery_is_quick_for_the_cost_model_and_never_comes_to_a_fixed_rule():
    for live in (1, 4):
        figures = recovery("cost_model", STRATEGIES, live=live, seed=1)
        assert 0 < figures["rounds_bad"] <= 100
        assert figures["rounds_back"] <= 200
    assert recovery("threshold", STRATEGIES, live=2, seed=1) == {"rounds_bad": NEVER, "rounds_back": 0}
    assert recovery("off", STRATEGIES, live=2, seed=1) == {"rounds_bad": 0, "rounds_back": NEVER}
