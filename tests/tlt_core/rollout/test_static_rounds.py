"""Rounds of fixed shape give the tokens of rounds that fit their rows, whatever the bucket, padding and strategy."""

import pytest
import torch

from conf.rollout import SpeculationConfig, StrategyConfig
from tests.tlt_core.rollout.playing import play, requests
from tests.tlt_core.rollout.test_spec_round import Broken, Cycle, Oracle, Random, Recorder, assert_same
from tlt_core.drafter.eagle3.files import save_eagle3
from tlt_core.drafter.eagle3.model import eagle3_from_target
from tlt_core.drafter.ngram.drafter import NgramDrafter
from tlt_core.items.speculation import NO_FLOORS, OFF, DraftTree, Strategy
from tlt_core.items.types import SamplingParams
from tlt_core.model.load import random_decoder
from tlt_core.rollout import build
from tlt_core.rollout.engine import RolloutEngine, Speculation

VOCAB, MAX_LEN, MAX_LIVE = 64, 96, 6  # buckets of 1, 2, 4 and 6 rows
CHAIN, TREE, WIDE = Strategy("d", 5, 1, 5), Strategy("d", 3, 3, 9), Strategy("d", 6, 2, 16)
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_new_tokens=40, stop_token_ids=(2,)),
    "T=0.7": SamplingParams(temperature=0.7, max_new_tokens=40, stop_token_ids=(2,)),
    "T=1": SamplingParams(max_new_tokens=40, stop_token_ids=(2, 3, 30)),
    "top-p, top-k": SamplingParams(top_p=0.8, top_k=9, max_new_tokens=30, stop_token_ids=(2,)),
}
JOINING = ((0, 1), (1, 2), (2, 3), (3, 5), (4, 10))  # (round, requests that have come)


@pytest.fixture(scope="module")
def decoder(tiny_config):
    decoder = random_decoder(tiny_config, seed=1, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if not name.endswith("norm.weight"):
                parameter *= 8
    return decoder


@pytest.fixture(scope="module", params=PARAMS, ids=list(PARAMS))
def case(request, decoder):
    """Parameters, and what rounds that fit their rows give, without speculation."""
    params = PARAMS[request.param]
    engine = RolloutEngine(decoder, max_live=MAX_LIVE, max_len=MAX_LEN)
    plain = play(engine, requests(10), params, arrivals=JOINING)[0]
    assert len({tuple(r.completion.tolist()) for r in plain.values()}) >= 4, "responses too alike to prove much"
    return params, plain


def engine_of(decoder, drafter=None, arms=(), **settings):
    speculation = Speculation({drafter.name: drafter}, Cycle(arms), menu=arms) if drafter is not None else None
    return RolloutEngine(decoder, max_live=MAX_LIVE, max_len=MAX_LEN, speculation=speculation, static=True, **settings)


def test_plain_rounds_while_requests_join_and_leave(decoder, case):
    params, plain = case
    engine = engine_of(decoder)
    found, traces = play(engine, requests(10), params, arrivals=JOINING)
    assert_same(plain, found)
    assert {t.report.live for t in traces} >= {1, 2, 3, 5, 6}, "rows were padded in some rounds, and not in others"
    assert {key.kind for key in engine.graphs._works} == {"plain"}
    assert {key.rows for key in engine.graphs._works} == {1, 2, 4, 6}


@pytest.mark.parametrize("arm", [CHAIN, TREE, WIDE], ids=str)
@pytest.mark.parametrize("drafter", ["right", "every third wrong", "random"])
def test_drafts_of_the_host(decoder, case, arm, drafter):
    params, plain = case
    made = {"right": Oracle(plain), "every third wrong": Oracle(plain, wrong_every=3), "random": Random()}[drafter]
    engine = engine_of(decoder, made, [arm])
    found, traces = play(engine, requests(10), params, arrivals=JOINING)
    assert_same(plain, found)
    assert engine.drafter_failures == {}
    assert sum(sum(t.report.drafted) for t in traces) > 0
    assert not made.rows, "every request was released"
    if drafter == "right":
        assert sum(t.tokens for t in traces) > 1.5 * sum(t.report.live for t in traces)


def test_reports_are_those_of_dynamic_rounds(decoder, case):
    """Same drafts, same verification: what the tuner is told may differ in seconds alone."""
    params, plain = case

    def told(static):
        arms = [CHAIN, OFF, TREE, WIDE]
        tuner = Cycle(arms)
        speculation = Speculation({"d": Oracle(plain, wrong_every=4)}, tuner, menu=arms)
        engine = RolloutEngine(decoder, max_live=MAX_LIVE, max_len=MAX_LEN, speculation=speculation, static=static)
        play(engine, requests(10), params, arrivals=JOINING)
        return [(rows, r._replace(draft_s=0, verify_s=0, backlog_s=0)) for rows, r in tuner.reports]

    assert told(True) == told(False)


def test_a_drafter_that_fails_costs_its_draft_alone(decoder, case):
    params, plain = case
    engine = engine_of(decoder, Broken(), [CHAIN])
    found, traces = play(engine, requests(10), params)
    assert_same(plain, found)
    assert sum(engine.drafter_failures.values()) == len(traces)


@pytest.mark.parametrize("limit", range(1, 8))
def test_the_end_inside_a_draft(decoder, limit):
    long = SamplingParams(max_new_tokens=50)
    truth = play(RolloutEngine(decoder, max_live=MAX_LIVE, max_len=MAX_LEN), requests(8), long)[0]
    params = SamplingParams(max_new_tokens=limit)
    short = play(RolloutEngine(decoder, max_live=MAX_LIVE, max_len=MAX_LEN), requests(8), params)[0]
    for arm in (CHAIN, TREE):
        assert_same(short, play(engine_of(decoder, Oracle(truth), [arm]), requests(8), params)[0])


def test_the_cache_ends_inside_a_draft(decoder):
    params = SamplingParams(max_new_tokens=500)
    plain = play(RolloutEngine(decoder, max_live=MAX_LIVE, max_len=MAX_LEN), requests(8), params)[0]
    assert {len(r.tokens) for r in plain.values()} == {MAX_LEN}
    for arm in (CHAIN, TREE, WIDE):
        assert_same(plain, play(engine_of(decoder, Oracle(plain), [arm]), requests(8), params)[0])


@pytest.fixture(scope="module")
def drafter_folder(decoder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("drafter") / "d-eagle3"
    model = eagle3_from_target(decoder, torch.arange(0, VOCAB, 2), scales=(1.0, 1.0, 1.0), seed=0)
    save_eagle3(model, folder, dtype=torch.float32)
    return folder


ARMS = (("eagle3", 5, 1, 5), ("eagle3", 3, 3, 8), ("eagle3", 4, 2, 12), ("ngram", 4, 2, 8))


def eagle3_engine(decoder, folder, arms=ARMS, *, static, capture=False, shuffled=True):
    """With both real drafters; every few rounds plain ones, so that the drafter falls behind."""
    menu = tuple(StrategyConfig(drafter=d, depth=depth, width=w, tokens=n) for d, depth, w, n in arms)
    cfg = SpeculationConfig(policy="fixed", menu=menu, drafter_path=str(folder))
    engine = build.make_engine(decoder, cfg, max_live=MAX_LIVE, max_len=MAX_LEN, seed=0, capture=capture, static=static)
    turns = [Strategy(*arm) for arm in arms]
    turns += [turns[0], OFF, turns[0], *[OFF] * 9, turns[0]] if shuffled else []
    engine.speculation = engine.speculation._replace(tuner=Cycle(turns))
    return engine


def test_real_drafters_in_turn(decoder, drafter_folder, case):
    """The same tokens as plain, and the same drafts as rounds that fit their rows: accepted tokens, round by round."""
    params, plain = case
    told = []
    for static in (True, False):
        engine = eagle3_engine(decoder, drafter_folder, static=static)
        found, traces = play(engine, requests(10), params, arrivals=JOINING)
        assert_same(plain, found)
        assert engine.drafter_failures == {}
        told.append([t.report._replace(draft_s=0, verify_s=0, backlog_s=0) for t in traces])
    assert told[0] == told[1]
    eagle3 = [t for t in told[0] if t.strategy.drafter == "eagle3"]
    assert sum(map(sum, (t.drafted for t in eagle3))) > 3 * len(eagle3)
    assert any(sum(t.accepted) for t in eagle3), "nothing was accepted: no path but the empty one was tested"


def test_captured_responses_are_those_of_dynamic_rounds(decoder, drafter_folder, case):
    params, _ = case
    captured = []
    for static in (True, False):
        engine = eagle3_engine(decoder, drafter_folder, static=static, capture=True)
        waiting, found = requests(6), {}

        def pull(wanted, waiting=waiting):
            taken, waiting[:] = waiting[:wanted], waiting[wanted:]
            return taken

        engine.decode(pull, lambda r: None, params, on_captured=lambda c, found=found: found.__setitem__(c.key, c))
        captured.append(found)
    assert len(captured[0]) == 6
    for key, mine in captured[0].items():
        theirs = captured[1][key]
        assert torch.equal(mine.tokens_L, theirs.tokens_L)
        for a, b in ((mine.taps_LE, theirs.taps_LE), (mine.last_PD, theirs.last_PD)):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(mine.lognorms_P, theirs.lognorms_P, atol=1e-4, rtol=1e-4)


def test_new_weights_are_used_without_a_new_capture(tiny_config, drafter_folder):
    """Of the policy and of the drafter, overwritten in place."""
    decoder = random_decoder(tiny_config, seed=1, dtype=torch.float32)
    other = random_decoder(tiny_config, seed=2, dtype=torch.float32)
    params = PARAMS["T=1"]
    engine = eagle3_engine(decoder, drafter_folder, static=True)
    first, _ = play(engine, requests(6), params)
    captured = dict(engine.graphs._works)
    engine.load_weights(other.named_parameters())
    second, _ = play(engine, requests(6), params)
    assert engine.graphs._works == captured
    assert_same(play(RolloutEngine(other, max_live=MAX_LIVE, max_len=MAX_LEN), requests(6), params)[0], second)
    assert any(first[key].tokens.tolist() != rollout.tokens.tolist() for key, rollout in second.items())


def test_a_drafters_new_vocabulary_is_used_without_a_new_capture(decoder, drafter_folder):
    from tlt_core.drafter.eagle3.files import export_weights

    params, arm = PARAMS["T=1"], (("eagle3", 4, 1, 4),)
    odd = eagle3_from_target(decoder, torch.arange(1, VOCAB, 2), scales=(1.0, 1.0, 1.0), seed=0)
    told = []
    for static in (True, False):
        engine = eagle3_engine(decoder, drafter_folder, arm, static=static, shuffled=False)
        play(engine, requests(6), params)
        engine.speculation.drafters["eagle3"].load_weights(export_weights(odd))
        _, traces = play(engine, requests(6), params)
        told.append([(t.report.drafted, t.report.accepted) for t in traces])
    assert told[0] == told[1]


def test_released_graphs_are_captured_again(decoder, case):
    params, plain = case
    engine = engine_of(decoder, NgramDrafter(), [Strategy("ngram", 3, 1, 3)])
    assert_same(plain, play(engine, requests(10), params)[0])
    count = len(engine.graphs)
    engine.release_graphs()
    assert len(engine.graphs) == 0
    assert_same(plain, play(engine, requests(10), params)[0])
    assert len(engine.graphs) == count > 0


class Same(Recorder):
    """Always drafts the same: a chain in row 0, siblings in row 2."""

    def propose(self, view, strategy):
        return DraftTree.of_lists([9, 9, 30, 11, 12], [-1, 0, 1, -1, -1], [0, 0, 0, 2, 2], [1, 2, 3, 1, 1])


def test_padding_touches_no_live_row(decoder):
    """Rows of padding and unused places may hold anything; every buffer of the live rows is as without them."""
    params = PARAMS["T=1"]
    state = []
    for poison in (False, True):
        engine = engine_of(decoder, Same(), [TREE])
        batch, cache = engine._batch, engine._cache
        engine._rounds.prepare(params)
        engine._admit(requests(3), params)  # in a bucket of 4
        if poison:
            batch.tokens_BC[3:] = 61
            batch.streams_B[3:] = 12345
            for kv in (cache.keys_YSKCd, cache.values_YSKCd):
                kv[:, 3:] = 7.0
            engine._rounds._target.tree.tokens_BU.fill_(63)
            engine._rounds._target.tree.depths_BU.fill_(1)
        for strategy in (OFF, TREE, OFF, TREE, TREE):
            engine._rounds.run(strategy, NO_FLOORS, params)
        assert engine.drafter_failures == {}
        lengths = batch.lengths
        state.append(
            [batch.tokens_BC[:3, : max(lengths)].clone(), batch.logprobs_BC[:3, : max(lengths)].clone()]
            + [kv[:, row, :, : length - 1].clone() for kv in (cache.keys_YSKCd, cache.values_YSKCd)
               for row, length in enumerate(lengths)]
        )  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(*state, strict=True))


def test_a_drafter_without_room_is_named(decoder):
    from tlt_core.drafter.eagle3.drafter import Eagle3Drafter

    model = eagle3_from_target(decoder, torch.arange(0, VOCAB, 2), scales=(1.0, 1.0, 1.0), seed=0)
    drafter = Eagle3Drafter(model, decoder, max_live=MAX_LIVE, max_len=MAX_LEN)
    with pytest.raises(ValueError, match="make it with room=6"):
        engine_of(decoder, drafter, [Strategy("eagle3", 4, 2, 8)])
