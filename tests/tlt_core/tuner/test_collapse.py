"""The monitor raises an alarm when a drafter collapses after a publish, and at no other time."""

import json
import random
from dataclasses import replace

import pytest
import torch

from tests.tlt_core.rollout.test_spec_round import PARAMS, Oracle, assert_same, requests, run
from tlt_core.items.speculation import OFF, RoundReport, Strategy
from tlt_core.model.load import random_decoder
from tlt_core.rollout.engine import RolloutEngine, Speculation
from tlt_core.tuner.collapse import CollapseMonitor, CollapseReport, collapse_metrics
from tlt_core.tuner.policies import make_tuner

CHAIN, DEEP, TREE = Strategy("eagle3", 3, 1, 3), Strategy("eagle3", 6, 1, 6), Strategy("eagle3", 3, 4, 12)
NGRAM = Strategy("ngram", 4, 1, 4)


def play(monitor, strategy, rate, rounds, *, rows=4, seed=0, stop=True):
    """Rounds whose rows accept each token with this rate; the verdict that ended them, and how many they were."""
    rng = random.Random(seed)
    depth = strategy.depth
    for i in range(rounds):
        hits = [next((j for j in range(depth) if rng.random() >= rate), depth) for _ in range(rows)]
        offered = (depth,) * rows
        verdict = monitor.observe(RoundReport(strategy, rows, 100, offered, offered, tuple(hits), 1e-3, 1e-2))
        if verdict is not None and stop:
            return verdict, i + 1
    return None, rounds


def test_a_collapse_is_judged_within_a_few_rounds_and_named(caplog):
    monitor = CollapseMonitor(["eagle3"])
    assert play(monitor, CHAIN, 0.7, 100)[0] is None  # nothing was published: nothing to judge
    assert monitor.published() == ()
    verdict, rounds = play(monitor, CHAIN, 0.1, 100)
    # 0.7 + 0.49 + 0.343 = 1.53 tokens a row are expected, 6.1 a round of four rows: 64 after 11 rounds
    assert 10 <= rounds <= 12
    assert verdict.drafter == "eagle3"
    assert verdict.collapsed
    assert verdict.ratio == pytest.approx(0.111 / 1.533, abs=0.06)
    assert "'eagle3' has collapsed" in caplog.text
    assert monitor.report().suspended == ("eagle3",)
    assert play(monitor, CHAIN, 0.7, 100)[0] is None  # it is not used, so these are not its rounds


@pytest.mark.parametrize("seed", range(20))
def test_no_alarm_while_the_drafter_is_as_good_or_a_little_worse(seed):
    monitor = CollapseMonitor(["eagle3"])
    play(monitor, CHAIN, 0.6, 100, seed=seed)
    for rate in (0.6, 0.55, 0.6):
        monitor.published("eagle3")
        verdict, _ = play(monitor, CHAIN, rate, 100, seed=100 + seed)
        assert not verdict.collapsed


def test_other_shapes_are_no_collapse():
    """Trees, then chains; long drafts, then short ones: fewer tokens are accepted, as many as were to be expected."""
    monitor = CollapseMonitor(["eagle3"])
    for strategy, rate in ((TREE, 0.9), (CHAIN, 0.4), (DEEP, 0.4)):
        play(monitor, strategy, rate, 100)
    monitor.published()
    assert play(monitor, CHAIN, 0.4, 200)[0].ratio == pytest.approx(1.0, abs=0.3)
    monitor.published()
    assert play(monitor, TREE, 0.9, 200)[0].ratio == pytest.approx(1.0, abs=0.3)
    monitor.published()
    assert play(monitor, TREE, 0.4, 200)[0].collapsed


def test_a_shape_that_was_not_seen_before_is_not_judged():
    monitor = CollapseMonitor(["eagle3"])
    play(monitor, CHAIN, 0.9, 100)
    monitor.published()
    assert play(monitor, TREE, 0.0, 100)[0] is None
    assert play(monitor, CHAIN, 0.9, 100)[0].ratio == pytest.approx(1.0, abs=0.2)


def test_a_drafter_that_never_helped_cannot_collapse_and_costs_no_memory():
    monitor = CollapseMonitor(["eagle3"])
    play(monitor, CHAIN, 0.0, 100)
    monitor.published()
    assert play(monitor, CHAIN, 0.0, 5000)[0] is None
    assert len(json.dumps(monitor.state_dict())) < 500


def test_the_next_publish_ends_a_suspension_and_the_past_is_remembered():
    monitor = CollapseMonitor(["eagle3"])
    play(monitor, CHAIN, 0.7, 100)
    monitor.published()
    play(monitor, CHAIN, 0.0, 100)
    assert monitor.published("eagle3") == ("eagle3",)
    assert monitor.report() == CollapseReport((), ())
    assert play(monitor, CHAIN, 0.0, 100)[0].collapsed  # as bad, and the collapse is no new standard
    assert monitor.published() == ("eagle3",)
    assert not play(monitor, CHAIN, 0.7, 100)[0].collapsed


def test_a_window_outlasts_a_new_policy_but_not_a_new_drafter():
    """A collapsed drafter is soon hardly used: its few rounds in each step add up."""
    for drafter, judged in ((None, True), ("eagle3", False)):
        monitor = CollapseMonitor(["eagle3"])
        play(monitor, CHAIN, 0.7, 100)
        verdicts = []
        for _ in range(8):
            monitor.published(drafter)
            verdicts.append(play(monitor, CHAIN, 0.0, 3)[0])
        assert any(v is not None and v.collapsed for v in verdicts) == judged


def test_only_the_drafters_with_weights_are_watched():
    monitor = CollapseMonitor(["eagle3"])
    play(monitor, NGRAM, 0.9, 100)
    monitor.published()
    assert play(monitor, NGRAM, 0.0, 100)[0] is None
    assert play(monitor, OFF._replace(depth=1), 0.0, 3)[0] is None


def test_state_survives_json():
    monitor = CollapseMonitor(["eagle3"])
    play(monitor, CHAIN, 0.7, 100)
    monitor.published()
    play(monitor, CHAIN, 0.0, 5)
    other = CollapseMonitor(["eagle3"])
    other.load_state_dict(json.loads(json.dumps(monitor.state_dict())))
    assert other.state_dict() == monitor.state_dict()
    assert play(other, CHAIN, 0.0, 100) == play(monitor, CHAIN, 0.0, 100)
    assert other.report() == monitor.report()
    CollapseMonitor(["another"]).load_state_dict(monitor.state_dict())


def test_metrics_by_hand():
    reports = [CollapseReport((), (1.1,)), CollapseReport(("eagle3",), (0.2,)), CollapseReport((), ())]
    assert collapse_metrics(reports) == {"drafter/alarm": 1.0, "drafter/canary_ratio": 0.2}
    assert collapse_metrics([CollapseReport((), ())]) == {"drafter/alarm": 0.0}


# ---------------------------------------------------------------------------------------------- in the engine


@pytest.fixture(scope="module")
def decoder(tiny_config):
    return random_decoder(tiny_config, seed=3, dtype=torch.float32)


def of_step(step):
    return [replace(r, key=r.key._replace(step=step)) for r in requests()]


def test_a_spoilt_publish_is_found_in_the_engine_and_speculation_falls_back(decoder, caplog):
    """The drafter is spoilt in step 1 and mended in step 2: meanwhile the other one takes over; tokens stay."""
    params = PARAMS["T=1"]
    plain = run(decoder, params, items=[r for step in range(4) for r in of_step(step)])[0]
    drafter, spare = Oracle(plain), Oracle(plain, wrong_every=4)
    tuner, monitor = make_tuner("fixed", (CHAIN, NGRAM)), CollapseMonitor(["eagle3"])
    engine = RolloutEngine(
        decoder,
        max_live=6,
        max_len=96,
        speculation=Speculation({"eagle3": drafter, "ngram": spare}, tuner, (CHAIN, NGRAM)),
    )
    used = []

    def on_round(trace):
        used.append(trace.report.strategy.drafter)
        verdict = monitor.observe(trace.report)
        if verdict is not None and verdict.collapsed:
            tuner.suspend(verdict.drafter)

    def generate(items):
        finished = {}

        def pull(wanted):
            taken, items[:] = items[:wanted], items[wanted:]
            return taken

        engine.decode(pull, lambda r: finished.__setitem__(r.key, r), params, on_round=on_round)
        return finished

    for step in range(4):
        drafter._wrong_every = 1 if step == 1 else 0
        for name in monitor.published("eagle3") if step else ():
            tuner.resume(name)
        used.clear()
        assert_same({r.key: plain[r.key] for r in of_step(step)}, generate(of_step(step)))
        assert bool(monitor.report().suspended) == (step == 1)
        if step == 1:
            first_other = used.index("ngram")
            assert first_other <= 8
            assert set(used[first_other:]) == {"ngram"}
        else:
            assert set(used) == {"eagle3"}
    assert caplog.text.count("has collapsed") == 1


def test_a_publish_is_judged_by_the_rounds_since_it_alone():
    """All that is drafted is accepted, before and after: exactly as much as was expected."""
    monitor = CollapseMonitor(["eagle3"])
    play(monitor, CHAIN, 1.0, 100)
    for _ in range(2):
        monitor.published("eagle3")
        assert play(monitor, CHAIN, 1.0, 100)[0].ratio == pytest.approx(1.0, rel=1e-9)


def test_the_rounds_of_a_collapse_without_a_verdict_are_not_what_is_expected_next():
    monitor = CollapseMonitor(["eagle3"])
    play(monitor, CHAIN, 0.9, 100)
    monitor.published("eagle3")
    before = monitor.state_dict()["eagle3"]["before"]
    assert play(monitor, CHAIN, 0.05, 3)[0] is None  # too few for a verdict
    monitor.published("eagle3")
    assert monitor.state_dict()["eagle3"]["before"] == before
    assert play(monitor, CHAIN, 0.9, 3)[0] is None
    monitor.published("eagle3")
    assert monitor.state_dict()["eagle3"]["before"] != before
