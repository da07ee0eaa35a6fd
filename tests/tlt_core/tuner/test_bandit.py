"""The bandit finds the best strategy of each bucket."""

from tlt_core.items.speculation import OFF, RoundReport, Strategy
from tlt_core.tuner.bandit import BucketedGreedy

A, B = Strategy("eagle", 2, 1, 2), Strategy("eagle", 4, 1, 4)


def report(strategy: Strategy, live: int, reward: float) -> RoundReport:
    """A round that emits `live` tokens at this rate."""
    return RoundReport(strategy, live, 0, (0,) * live, (0,) * live, (0,) * live, 0.0, live / reward)


def play(learner: BucketedGreedy, best: dict[int, Strategy], rounds: int) -> dict[int, list[Strategy]]:
    """Rewards of 2 for the best strategy of each batch size and 1 for the others."""
    picks: dict[int, list[Strategy]] = {live: [] for live in best}
    for _ in range(rounds):
        for live, strategy in best.items():
            picks[live].append(learner.pick(live))
            learner.reward(report(picks[live][-1], live, 2.0 if picks[live][-1] == strategy else 1.0))
    return picks


def test_each_bucket_finds_its_strategy_and_keeps_exploring() -> None:
    picks = play(BucketedGreedy((A, B), seed=3), {2: B, 6: OFF}, 400)
    for live, best in ((2, B), (6, OFF)):
        assert set(picks[live][:6]) == {OFF, A, B}
        share = picks[live][10:].count(best) / 390
        assert 0.88 < share < 0.99  # 1 - epsilon + epsilon / 3


def test_no_exploration_at_epsilon_zero_and_the_median_ignores_a_spike() -> None:
    learner = BucketedGreedy((A, B), epsilon=0.0, seed=3)
    play(learner, {2: B}, 10)
    for _ in range(3):
        learner.reward(report(B, 2, 0.1))
    assert learner.pick(2) == B
