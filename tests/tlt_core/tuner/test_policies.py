"""Throughput of each policy on a simulated engine, against the best fixed strategy and plain decoding."""

import json
from functools import cache
from statistics import median

import pytest

from bench.tuner.simulator import Hits, pass_seconds
from bench.tuner.workloads import WORKLOADS, SimulatedWork, ThresholdTuner
from tlt_core.items.speculation import NO_MIN_DRAFT_PROBS, OFF, RoundReport, Strategy
from tlt_core.tuner.policies import Kind, RecordedTuner, make_tuner

SEED = 1
STRATEGIES = (
    Strategy("ngram", 4, 1, 4),
    Strategy("ngram", 8, 1, 8),
    Strategy("ngram", 2, 1, 2),
    Strategy("eagle3", 2, 1, 2),
    Strategy("eagle3", 4, 1, 4),
    Strategy("eagle3", 7, 1, 7),
    Strategy("eagle3", 5, 2, 8),
)


HOSTILE = [name for name in WORKLOADS if name.startswith("hostile")]
SHORT = [name for name in WORKLOADS if name.startswith("short")]


def first(strategy: Strategy | None) -> tuple[Strategy, ...]:
    """The strategies with this strategy at its head, which `fixed` uses."""
    return STRATEGIES if strategy is None else (strategy, *(s for s in STRATEGIES if s != strategy))


def tuner(kind: Kind = "cost_model", strategy: Strategy | None = None) -> RecordedTuner:
    """The cost model's is calibrated on the simulated engine."""
    made = make_tuner(kind, first(strategy), seed=SEED)
    if kind == "cost_model":
        made.calibrate(pass_seconds, max_live=32, max_tokens=160, budget_s=1.0)
    return made


@cache
def rate(name: str, kind: Kind, strategy: Strategy | None = None, seed: int = SEED) -> float:
    """Expected tokens a second over the whole workload."""
    engine = WORKLOADS[name].engine(seed=seed)
    engine.run(tuner(kind, strategy))
    return engine.rate


def best_fixed(name: str, seed: int = SEED) -> float:
    """Of plain decoding and each strategy."""
    return max(rate(name, "off", seed=seed), *(rate(name, "fixed", strategy, seed) for strategy in STRATEGIES))


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_cost_model_finds_the_best_strategy(name: str) -> None:
    """The median of three seeds, as the benchmark judges it, and no seed far below."""
    shares = sorted(rate(name, "cost_model", seed=seed) / best_fixed(name, seed) for seed in (1, 2, 3))
    assert shares[1] >= 0.97
    assert shares[0] >= 0.94


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", HOSTILE + SHORT)
def test_the_cost_model_hardly_loses_where_nothing_can_be_gained(name: str, seed: int) -> None:
    assert rate(name, "cost_model", seed=seed) >= (0.97 if name in SHORT else 0.98) * rate(name, "off", seed=seed)


def test_the_other_policies_lose_where_they_must() -> None:
    assert rate("heavy tail", "cost_model") > 1.02 * rate("heavy tail", "beg_mab")
    assert rate("hostile, large batch", "fixed", STRATEGIES[4]) < 0.9 * rate("hostile, large batch", "off")
    assert rate("tail, good drafter", "beg_mab") > rate("tail, good drafter", "off")


@pytest.mark.parametrize("live", [1, 8])
def test_a_change_of_the_drafter_is_followed_both_ways(live: int) -> None:
    """The median of three seeds, with chains and n-grams."""
    strategies = [s for s in STRATEGIES if s.width == 1]
    eagle = [s for s in strategies if s.drafter == "eagle3"]
    before, bad, back = [], [], []
    for seed in range(1, 4):
        engine = SimulatedWork(Hits(0.85), Hits(0.1, cover=0.3), live, 10**6).engine(seed=seed)
        adaptive = make_tuner("cost_model", strategies)
        adaptive.calibrate(pass_seconds, max_live=32, max_tokens=160, budget_s=1.0)
        engine.run(adaptive, 150)
        before.append(engine.share(*eagle, last=50))
        good, engine.hits["eagle3"] = engine.hits["eagle3"], Hits(0.0)
        engine.run(adaptive, 160)
        bad.append(engine.share(*eagle, last=96))  # off within 64 rounds
        engine.hits["eagle3"] = good
        engine.run(adaptive, 150)
        back.append(engine.share(*eagle, last=50))  # back within 100
    assert median(before) > 0.85
    assert median(bad) < 0.2
    assert median(back) > 0.85


@pytest.mark.parametrize(("live", "hits"), [(1, Hits(0.0)), (4, Hits(0.0, cover=0.0)), (16, Hits(0.02, cover=0.5))])
def test_useless_drafters_are_off_within_64_rounds(hits: Hits, live: int) -> None:
    engine = SimulatedWork(hits, hits, live, 10**6).engine(seed=SEED)
    adaptive = tuner()
    engine.run(adaptive, 64)
    assert engine.share(OFF, last=32) > 0.75
    engine.run(adaptive, 300)
    assert engine.share(OFF, last=300) > 0.85


def test_a_drafter_that_stalls_is_not_tried_again_for_long() -> None:
    adaptive, used = tuner(), 0
    for _ in range(300):
        strategy = adaptive.choose([0, 1], 200)
        used += not strategy.is_off
        drafts = (min(strategy.depth, strategy.tokens),) * 2
        draft_s = 0.0 if strategy.is_off else 1.0
        verify_s = pass_seconds(2, 2 + sum(drafts), 200)
        adaptive.observe([0, 1], RoundReport(strategy, 2, 200, drafts, drafts, (0, 0), draft_s, verify_s))
    assert 1 <= used <= 2


@pytest.mark.parametrize("name", HOSTILE + SHORT)
def test_probing_stays_within_its_budget(name: str) -> None:
    engine, adaptive = WORKLOADS[name].engine(seed=SEED), tuner()
    engine.run(adaptive)
    total_s = adaptive.ledger.seconds
    last_round_s = 0.5 * max(seconds for _, _, seconds, _ in engine.history)  # it began within the budget
    lost_s = adaptive.snapshot()["probe_share"] * total_s
    assert lost_s <= 0.008 * total_s + 2.1 * pass_seconds(1, 1, 100) + last_round_s


@pytest.mark.parametrize("rounds", [400, 432])
def test_a_published_drafter_is_tried_soon(rounds: int) -> None:
    eagle = [s for s in STRATEGIES if s.drafter == "eagle3"]
    engine = SimulatedWork(Hits(0.0), Hits(0.0), 4, 10**6).engine(seed=SEED)
    adaptive = tuner()
    engine.run(adaptive, rounds)
    engine.hits["eagle3"] = Hits(0.85)
    adaptive.notify_change("eagle3")
    engine.run(adaptive, 30)
    assert engine.share(*eagle, last=15) > 0.85


def test_a_drafter_that_is_measured_to_be_alike_is_no_news() -> None:
    """Choices are those without a publish; after one that is not measured they differ."""
    engines = {change: WORKLOADS["near break-even"].engine(seed=SEED) for change in (None, 0.01, float("inf"))}
    for change, engine in engines.items():
        adaptive = tuner()
        for _ in range(6):
            engine.run(adaptive, 40)
            if change is not None:
                adaptive.notify_change("eagle3", change=change)
    assert engines[0.01].history == engines[None].history
    assert engines[float("inf")].history != engines[None].history


def test_off_comes_back_when_drafting_becomes_dear() -> None:
    engine = SimulatedWork(Hits(0.7), Hits(0.0), 1, 10**6).engine(seed=SEED)
    adaptive = tuner()
    engine.run(adaptive, 150)
    assert engine.share(OFF, last=40) < 0.2
    engine.rows.update({key: [100.0, 1e6, 0.0] for key in range(1000, 1031)})  # 31 requests join in mid-flight
    engine.run(adaptive, 40)
    assert engine.share(OFF, last=30) > 0.9


@pytest.mark.parametrize("kind", ["cost_model", "beg_mab", "fixed", "off"])
def test_choices_are_the_same_after_a_restart(kind: Kind) -> None:
    engines = [WORKLOADS["near break-even"].engine(seed=SEED) for _ in range(2)]
    first, second = tuner(kind), tuner(kind)
    for engine in engines:
        engine.run(first if engine is engines[0] else second, 90)
    assert engines[0].history == engines[1].history
    restarted = make_tuner(kind, STRATEGIES, seed=99)
    restarted.load_state_dict(json.loads(json.dumps(second.state_dict())))
    engines[0].run(first, 120)
    engines[1].run(restarted, 120)
    assert engines[0].history == engines[1].history
    assert restarted.ledger.state_dict() == first.ledger.state_dict()


def test_state_of_other_strategies_loads() -> None:
    engine, adaptive = WORKLOADS["tail, good drafter"].engine(seed=SEED), tuner()
    engine.run(adaptive, 100)
    other = make_tuner("cost_model", [Strategy("ngram", 4, 1, 4), Strategy("suffix", 3, 1, 3)])
    other.load_state_dict(adaptive.state_dict())
    assert other.choose([0, 1], 300).drafter in ("off", "ngram", "suffix")


def test_threshold_fixed_and_off() -> None:
    strategies = first(STRATEGIES[4])
    threshold, fixed, off = (
        ThresholdTuner(strategies, max_live=3),
        make_tuner("fixed", strategies),
        make_tuner("off", strategies),
    )
    assert [threshold.choose(range(live), 0) for live in (1, 3, 4)] == [STRATEGIES[4], STRATEGIES[4], OFF]
    assert {fixed.choose(range(live), 0) for live in (1, 3, 40)} == {STRATEGIES[4]}
    assert {off.choose(range(live), 0) for live in (1, 3, 40)} == {OFF}
    assert make_tuner("fixed", STRATEGIES).choose([0], 0) == STRATEGIES[0]


@pytest.mark.parametrize("kind", ["cost_model", "beg_mab", "fixed", "off"])
def test_a_suspended_drafter_is_not_chosen_until_it_is_resumed(kind: Kind) -> None:
    """The best drafter is suspended in mid-flight: the other one takes over, and none when that is suspended too."""
    engine = SimulatedWork(Hits(0.85), Hits(0.6), 2, 10**6).engine(seed=SEED)
    adaptive = tuner(kind, STRATEGIES[4])

    def used(rounds: int) -> set[str]:
        engine.run(adaptive, rounds)
        return {strategy.drafter for strategy, *_ in engine.history[-rounds:]}

    speculates = kind != "off"
    assert ("eagle3" in used(150)) == speculates
    adaptive.suspend("eagle3")
    restarted = tuner(kind, STRATEGIES[4])
    restarted.load_state_dict(json.loads(json.dumps(adaptive.state_dict())))
    assert "eagle3" not in used(200)
    assert (engine.share(*STRATEGIES[:3], last=100) > 0.75) == speculates
    adaptive.suspend("ngram")
    assert used(200) == {"off"}
    adaptive.resume("eagle3")
    assert "ngram" not in used(100)
    assert (engine.share(*STRATEGIES[3:], last=50) > 0.75) == speculates
    adaptive.resume("ngram")
    engine.run(restarted, 100)
    assert "eagle3" not in {strategy.drafter for strategy, *_ in engine.history[-100:]}


def test_no_strategy_is_plain_decoding() -> None:
    plain = make_tuner("cost_model")
    assert plain.choose([0], 10) == OFF
    plain.observe([0], RoundReport(OFF, 1, 10, (0,), (0,), (0,), 0.0, 0.01))
    assert plain.choose([0], 10) == OFF


def test_wrong_settings_name_the_remedy() -> None:
    with pytest.raises(ValueError, match="twice"):
        make_tuner("cost_model", [STRATEGIES[0], STRATEGIES[0]])
    with pytest.raises(ValueError, match="name one"):
        make_tuner("fixed")
    with pytest.raises(ValueError, match="choose cost_model"):
        make_tuner("best")  # type: ignore[arg-type]


def test_the_floor_is_what_a_draft_token_costs_in_tokens() -> None:
    """In the simulator a token of a pass costs 0.03 ms and a part of the curve; a larger batch emits more meanwhile.
    Drafters' estimates of low chances are 0.1 too low."""
    min_draft_probs = {}
    for live in (1, 4, 8):
        made = tuner()
        SimulatedWork(Hits(0.8), Hits(0.4, cover=0.5), live, 600).engine(seed=SEED).run(made, 40)
        rows, context = list(range(live)), 300 * live
        chosen = made.choose(rows, context)
        cost = made.cost.token_seconds(live, 4, context)
        real = (pass_seconds(live, 5 * live, context) - pass_seconds(live, live, context)) / (4 * live)
        assert 0.6 * real < cost < 1.6 * real
        min_draft_probs[live] = made.min_draft_probs.token
        best = max(estimate.rate for estimate in made.estimates(rows, context).values())
        worth = best * made.cost.token_seconds(live, chosen.tokens, context) - 0.1
        if worth < 0.02:
            assert made.min_draft_probs == NO_MIN_DRAFT_PROBS
        else:
            assert made.min_draft_probs.token == pytest.approx(min(worth, 0.8))
            assert made.min_draft_probs.level == pytest.approx(best * made.cost.level_seconds(chosen.drafter))
    assert 0 <= min_draft_probs[1] < min_draft_probs[4] < min_draft_probs[8] <= 0.8
    assert tuner("fixed").min_draft_probs == tuner("beg_mab").min_draft_probs == NO_MIN_DRAFT_PROBS


def test_there_is_no_floor_where_tokens_cost_nothing() -> None:
    """A GPU that waits for its weights: nothing is cut, so nobody has to look at the device's estimates."""
    made = make_tuner("cost_model", STRATEGIES, seed=SEED)
    made.calibrate(lambda *_: 10e-3, max_live=32, max_tokens=160, budget_s=1.0)
    for _ in range(20):
        chosen = made.choose([0], 100)
        drafted, hits = (chosen.tokens,), (min(chosen.depth, chosen.tokens),)
        draft_s = 0.0 if chosen.is_off else 1e-3
        made.observe([0], RoundReport(chosen, 1, 100, drafted, hits, hits, draft_s, 10e-3))
        assert made.min_draft_probs == NO_MIN_DRAFT_PROBS
    assert not chosen.is_off
