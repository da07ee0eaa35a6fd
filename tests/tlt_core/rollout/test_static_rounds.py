"""Rounds of fixed shape give the tokens of rounds that fit their rows, whatever the bucket, padding and strategy."""

import itertools

import pytest
import torch

from conf.rollout import SpeculationConfig, StrategyConfig
from tests.tlt_core.rollout.playing import PARAMS, VOCAB, Broken, Cycle, Oracle, Random, assert_same, play, requests
from tlt_core.drafter.eagle3.drafter import Eagle3Drafter
from tlt_core.drafter.eagle3.files import save_eagle3
from tlt_core.drafter.eagle3.model import eagle3_from_target
from tlt_core.items.speculation import OFF, Strategy
from tlt_core.items.types import SamplingParams
from tlt_core.rollout import build
from tlt_core.rollout.engine import RolloutEngine, Speculation

MAX_LEN, MAX_LIVE = 96, 6  # buckets of 1, 2, 4 and 6 rows
CHAIN, TREE, WIDE = Strategy("d", 5, 1, 5), Strategy("d", 3, 3, 9), Strategy("d", 6, 2, 16)
JOINING = ((0, 1), (1, 2), (2, 3), (3, 5), (4, 10))  # (round, requests that have come)
ARMS = (("eagle3", 5, 1, 5), ("eagle3", 3, 3, 8), ("eagle3", 4, 2, 12), ("ngram", 4, 2, 8))


@pytest.fixture(scope="module", params=PARAMS, ids=list(PARAMS))
def case(request, decoder):
    """Parameters, and what rounds that fit their rows give, without speculation."""
    params = PARAMS[request.param]
    plain = play(engine_of(decoder, static=False), requests(10), params, arrivals=JOINING)[0]
    assert len({tuple(r.completion.tolist()) for r in plain.values()}) >= 4, "responses too alike to prove much"
    return params, plain


def engine_of(decoder, drafter=None, arms=(), *, static=True):
    speculation = Speculation({drafter.name: drafter}, Cycle(arms), strategies=arms) if drafter is not None else None
    return RolloutEngine(decoder, max_live=MAX_LIVE, max_len=MAX_LEN, speculation=speculation, static=static)


def told(traces):
    """What rounds report, but for seconds."""
    return [t.report._replace(draft_s=0, verify_s=0, backlog_s=0) for t in traces]


def test_plain_rounds_while_requests_join_and_leave(decoder, case):
    params, plain = case
    engine = engine_of(decoder)
    found, traces = play(engine, requests(10), params, arrivals=JOINING)
    assert_same(plain, found)
    assert {t.report.live for t in traces} >= {1, 2, 3, 5, 6}, "rows were padded in some rounds, and not in others"
    assert len(engine.graphs) == 4, "one for each bucket"


@pytest.mark.parametrize("wrong_every", [0, 3, None], ids=["right", "every third wrong", "random"])
def test_drafts_of_the_host_and_their_reports(decoder, case, wrong_every):
    """Same drafts, same verification: what the tuner is told may differ in seconds alone."""
    params, plain = case
    rounds = []
    for static in (True, False):
        drafter = Random() if wrong_every is None else Oracle(plain, wrong_every=wrong_every)
        engine = engine_of(decoder, drafter, [CHAIN, OFF, TREE, WIDE], static=static)
        found, traces = play(engine, requests(10), params, arrivals=JOINING)
        assert_same(plain, found)
        assert engine.drafter_failures == {}
        assert not drafter.rows, "every request was released"
        observed = [report for _, report in engine.speculation.tuner.reports]
        assert observed == [t.report for t in traces], "the tuner is told what happened"
        rounds.append(told(traces))
    assert rounds[0] == rounds[1]
    assert sum(sum(r.drafted) for r in rounds[0]) > 0
    if wrong_every == 0:
        assert sum(t.tokens for t in traces) > 1.5 * sum(t.report.live for t in traces)


def test_a_drafter_that_fails_costs_its_draft_alone(decoder, case, caplog):
    params, plain = case
    engine = engine_of(decoder, Broken(), [CHAIN])
    found, traces = play(engine, requests(10), params)
    assert_same(plain, found)
    assert sum(engine.drafter_failures.values()) == len(traces)
    assert sum("failed" in record.message for record in caplog.records) == 1, "said once"


@pytest.mark.parametrize("limit", [1, 2, 4, 6, 7, 500])
def test_the_end_of_a_response_or_of_the_cache_inside_a_draft(decoder, limit):
    params = SamplingParams(max_new_tokens=limit)
    truth = play(engine_of(decoder, static=False), requests(8), SamplingParams(max_new_tokens=500))[0]
    assert {len(r.tokens) for r in truth.values()} == {MAX_LEN}
    short = play(engine_of(decoder, static=False), requests(8), params)[0]
    for arm, static in itertools.product((CHAIN, TREE, WIDE), (True, False)):
        engine = engine_of(decoder, Oracle(truth), [arm], static=static)
        assert_same(short, play(engine, requests(8), params)[0])


@pytest.mark.parametrize("static", [True, False])
def test_a_stop_token_inside_a_draft(decoder, static):
    """The drafter goes on behind it with what the target would choose: that is accepted, and dropped."""
    longer = play(engine_of(decoder, static=False), requests(8), SamplingParams(max_new_tokens=50))[0]
    stops = tuple({int(r.completion[9]) for r in longer.values()})
    params = SamplingParams(max_new_tokens=50, stop_token_ids=stops)
    found, traces = play(engine_of(decoder, Oracle(longer), [TREE], static=static), requests(8), params)
    assert_same(play(engine_of(decoder, static=False), requests(8), params)[0], found)
    assert sum(t.report.live + sum(t.report.accepted) - t.tokens for t in traces) > 0, "dropped behind an end"


@pytest.fixture(scope="module")
def drafter_folder(decoder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("drafter") / "d-eagle3"
    model = eagle3_from_target(decoder, torch.arange(0, VOCAB, 2), scales=(1.0, 1.0, 1.0), seed=0)
    save_eagle3(model, folder, dtype=torch.float32)
    return folder


def eagle3_engine(decoder, folder, *, static):
    """With both real drafters; every few rounds plain ones, so that the drafter falls behind."""
    strategies = tuple(StrategyConfig(drafter=d, depth=depth, width=w, tokens=n) for d, depth, w, n in ARMS)
    cfg = SpeculationConfig(policy="fixed", strategies=strategies, drafter_path=str(folder))
    engine = build.make_engine(decoder, cfg, max_live=MAX_LIVE, max_len=MAX_LEN, seed=0, capture=True, static=static)
    turns = [Strategy(*arm) for arm in ARMS]
    turns += [turns[0], OFF, turns[0], *[OFF] * 9, turns[0]]
    engine.speculation = engine.speculation._replace(tuner=Cycle(turns))
    return engine


def test_real_drafters_in_turn(decoder, drafter_folder, case):
    """The same tokens as plain, and the same drafts as rounds that fit their rows: accepted tokens, round by round; and
    what is captured of the responses."""
    params, plain = case
    rounds, captured = [], []
    for static in (True, False):
        engine, states = eagle3_engine(decoder, drafter_folder, static=static), {}
        found, traces = play(
            engine, requests(10), params, JOINING, on_captured=lambda c, states=states: states.__setitem__(c.key, c)
        )
        assert_same(plain, found)
        assert engine.drafter_failures == {}
        rounds.append(told(traces))
        captured.append(states)
    assert rounds[0] == rounds[1]
    eagle3 = [t for t in rounds[0] if t.strategy.drafter == "eagle3"]
    assert sum(map(sum, (t.drafted for t in eagle3))) > 3 * len(eagle3)
    assert any(sum(t.accepted) for t in eagle3), "nothing was accepted: no path but the empty one was tested"
    assert len(captured[0]) == 10
    for key, mine in captured[0].items():
        theirs = captured[1][key]
        assert torch.equal(mine.tokens_L, theirs.tokens_L)
        for name in ("taps_LE", "last_PD", "lognorms_P"):
            torch.testing.assert_close(getattr(mine, name), getattr(theirs, name), atol=1e-4, rtol=1e-4)


def test_a_drafter_without_room_is_named(decoder):
    model = eagle3_from_target(decoder, torch.arange(0, VOCAB, 2), scales=(1.0, 1.0, 1.0), seed=0)
    drafter = Eagle3Drafter(model, decoder, max_live=MAX_LIVE, max_len=MAX_LEN)
    with pytest.raises(ValueError, match="room=6"):
        engine_of(decoder, drafter, [Strategy("eagle3", 4, 2, 8)])
