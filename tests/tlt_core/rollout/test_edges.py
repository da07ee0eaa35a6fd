"""Where speculation engines break: batches that start small or grow again, requests that join, responses that end
inside a draft.  Each with a proof that the case did occur, and the tokens of plain decoding."""

import pytest
import torch

from conf.rollout import SpeculationConfig, StrategyConfig
from tests.tlt_core.rollout.playing import VOCAB, Cycle, Oracle, assert_same, play, requests
from tlt_core.drafter.eagle3.files import save_eagle3
from tlt_core.drafter.eagle3.model import eagle3_from_target
from tlt_core.items.speculation import OFF, Strategy
from tlt_core.items.types import FinishReason, SamplingParams
from tlt_core.rollout import build
from tlt_core.rollout.engine import RolloutEngine, Speculation

MAX_LEN, MAX_LIVE = 96, 8
CHAIN, TREE = Strategy("d", 5, 1, 5), Strategy("d", 4, 3, 12)
LONG = SamplingParams(max_new_tokens=50)


class UpTo(Cycle):
    """Speculates while at most so many requests live."""

    def __init__(self, arms, most) -> None:
        super().__init__(arms)
        self._most = most

    def choose(self, rows, context):
        return super().choose(rows, context) if len(rows) <= self._most else OFF


@pytest.fixture(scope="module")
def drafter_folder(decoder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("drafter") / "d-eagle3"
    model = eagle3_from_target(decoder, torch.arange(0, VOCAB, 2), scales=(1.0, 1.0, 1.0), seed=0)
    save_eagle3(model, folder, dtype=torch.float32)
    return folder


def plain(decoder, items, params):
    return play(RolloutEngine(decoder, max_live=MAX_LIVE, max_len=MAX_LEN), items, params)[0]


def real(decoder, folder, drafter, *, most):
    """An engine with the real drafter, used while at most so many requests live."""
    arm = StrategyConfig(drafter=drafter, depth=4, width=2, tokens=8)
    cfg = SpeculationConfig(policy="fixed", strategies=(arm,), drafter_path=str(folder))
    engine = build.make_engine(decoder, cfg, max_live=MAX_LIVE, max_len=MAX_LEN, seed=0)
    engine.speculation = engine.speculation._replace(tuner=UpTo(engine.speculation.strategies, most))
    return engine


def fixed(decoder, drafter, arm):
    speculation = Speculation({"d": drafter}, Cycle([arm]), [arm])
    return RolloutEngine(decoder, max_live=MAX_LIVE, max_len=MAX_LEN, speculation=speculation)


@pytest.mark.parametrize("drafter", ["ngram", "eagle3"])
def test_a_batch_that_starts_below_the_threshold(decoder, drafter_folder, drafter):
    """The first decode round of all is speculative: there was no plain one to prepare anything."""
    items = requests(2)
    engine = real(decoder, drafter_folder, drafter, most=4)
    finished, traces = play(engine, items, LONG)
    assert not traces[0].report.strategy.is_off
    assert sum(sum(t.report.drafted) for t in traces) > 0
    assert engine.drafter_failures == {}
    assert_same(plain(decoder, items, LONG), finished)


@pytest.mark.parametrize("drafter", ["ngram", "eagle3"])
def test_growth_above_the_threshold_and_back(decoder, drafter_folder, drafter):
    """Speculation stops when five more requests come, and goes on with all when some have ended."""
    items = requests(7)
    engine = real(decoder, drafter_folder, drafter, most=3)
    short_and_long = SamplingParams(max_new_tokens=50, stop_token_ids=(2, 7, 30))
    # the engine asks for more after each round, as long as there are free slots
    finished, traces = play(engine, items, short_and_long, arrivals=((0, 2), (3, 7)))
    phases = [traces[0].report.strategy.is_off]
    for trace in traces:
        assert trace.report.strategy.is_off == (trace.report.live > 3)
        if trace.report.strategy.is_off != phases[-1]:
            phases.append(trace.report.strategy.is_off)
    assert phases == [False, True, False]
    assert engine.drafter_failures == {}
    assert_same(plain(decoder, items, short_and_long), finished)


@pytest.mark.parametrize("arm", [CHAIN, TREE], ids=str)
def test_requests_that_join_while_others_are_drafted_for(decoder, arm):
    """One more before every round; each has drafts in its first round already."""
    items = requests(8)
    reference = plain(decoder, items, LONG)
    finished, traces = play(
        fixed(decoder, Oracle(reference), arm), items, LONG, arrivals=tuple((i, i + 1) for i in range(8))
    )
    assert [t.report.live for t in traces[:8]] == list(range(1, 9))
    assert all(t.report.drafted[-1] > 0 for t in traces[:8])
    assert_same(reference, finished)


@pytest.mark.parametrize("arm", [CHAIN, TREE], ids=str)
@pytest.mark.parametrize("limit", [1, 2, 5, 6, 7, 11])
def test_max_length_inside_a_draft(decoder, arm, limit):
    """Drafts are right, so that without the limit each round would emit six (five) tokens."""
    items = requests(8)
    longer, params = plain(decoder, items, LONG), SamplingParams(max_new_tokens=limit)
    finished, traces = play(fixed(decoder, Oracle(longer), arm), items, params)
    assert {len(r.completion) for r in finished.values()} == {limit}
    assert {r.finish for r in finished.values()} == {FinishReason.LENGTH}
    assert len(traces) == -(-limit // (arm.depth + 1))
    assert_same(plain(decoder, items, params), finished)


@pytest.mark.parametrize("arm", [CHAIN, TREE], ids=str)
def test_the_cache_ends_inside_a_draft(decoder, arm):
    params = SamplingParams(max_new_tokens=500)
    reference = plain(decoder, requests(8), params)
    assert {len(r.tokens) for r in reference.values()} == {MAX_LEN}
    assert_same(reference, play(fixed(decoder, Oracle(reference), arm), requests(8), params)[0])


@pytest.mark.parametrize("arm", [CHAIN, TREE], ids=str)
def test_eos_inside_a_draft(decoder, arm):
    """The drafter goes on beyond the end with the very tokens that the target would choose: they are accepted, and
    dropped."""
    items = requests(8)
    longer = plain(decoder, items, LONG)
    stops = tuple({int(r.completion[9]) for r in longer.values()})
    params = SamplingParams(max_new_tokens=50, stop_token_ids=stops)
    finished, traces = play(fixed(decoder, Oracle(longer), arm), items, params)
    reference = plain(decoder, items, params)
    assert_same(reference, finished)
    assert {r.finish for r in finished.values()} == {FinishReason.STOP}
    for rollout in finished.values():
        ends = [int(token) in stops for token in rollout.completion]
        assert ends[-1]
        assert not any(ends[:-1])
    dropped = [t.report.live + sum(t.report.accepted) - t.tokens for t in traces]
    assert sum(dropped) > 0, "no response ended before its draft did"
    assert sum(t.tokens for t in traces) == sum(len(r.completion) for r in reference.values())
