"""Speculation changes no token, whatever is drafted: the theorem of `spec_round`, checked token by token."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.tlt_core.rollout.playing import Cycle
from tlt_core.items.speculation import OFF, DraftTree, LiveView, Strategy
from tlt_core.items.types import FinishReason, GenerationRequest, NoiseKey, Rollout, SamplingParams
from tlt_core.model.load import load_decoder
from tlt_core.rollout.engine import RolloutEngine, RoundTrace, Speculation

VOCAB = 64
MAX_LEN = 96
SHAPES = (Strategy("d", 1, 1, 1), Strategy("d", 5, 1, 5), Strategy("d", 3, 3, 9), Strategy("d", 6, 2, 16))


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        eos_token_id=2,
    )
    path = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(path)
    return load_decoder(path, dtype=torch.float32)


def requests(num_prompts: int = 6, samples: int = 3) -> list[GenerationRequest]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 20, (num_prompts,), generator=generator).tolist()
    prompts = [torch.randint(3, VOCAB, (n,), generator=generator).to(torch.int32) for n in lengths]
    return [GenerationRequest(NoiseKey(0, 1, p, s), t) for p, t in enumerate(prompts) for s in range(samples)]


class Recorder:
    """Base of the drafters: remembers which request is in which row."""

    name = "d"
    taps: tuple[int, ...] = ()
    backlog_s = 0.0

    def __init__(self) -> None:
        self.rows: dict[int, NoiseKey] = {}

    def admit(self, row, request):
        assert row == len(self.rows)
        self.rows[row] = request.key

    def release(self, row, tokens):
        del self.rows[row]

    def move(self, source, target):
        self.rows[target] = self.rows.pop(source)


class Oracle(Recorder):
    """Knows the plain responses; every `wrong_every`-th token of a path is wrong, and with width > 1 the right token
    hides among wrong siblings."""

    def __init__(self, plain: dict[NoiseKey, Rollout], *, wrong_every: int = 0) -> None:
        super().__init__()
        self._plain, self._wrong_every = plain, wrong_every

    def propose(self, view: LiveView, strategy: Strategy) -> DraftTree:
        tokens, parents, rows, depths = [], [], [], []
        for row, (request, length, room) in enumerate(zip(view.requests, view.lengths, view.room, strict=True)):
            truth = self._plain[request.key].tokens[length:].tolist()
            parent, first = -1, len(tokens)
            for depth in range(1, min(strategy.depth, room - 1) + 1):
                if len(truth) < depth:  # beyond the end: anything goes
                    truth.append(5)
                right = truth[depth - 1]
                if self._wrong_every and (length + depth) % self._wrong_every == 0:
                    right = (right + 1) % VOCAB
                siblings = [(right + 7 * k) % VOCAB for k in range(strategy.width - 1, -1, -1)]
                for token in siblings:
                    if len(tokens) - first < strategy.tokens:
                        tokens.append(token), parents.append(parent), rows.append(row), depths.append(depth)
                if len(tokens) - first >= strategy.tokens:
                    break
                parent = len(tokens) - 1  # the right one comes last
        return DraftTree.of_lists(tokens, parents, rows, depths)


class Random(Recorder):
    """Random trees of random shapes, some rows without any."""

    def __init__(self) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(7)

    def _draw(self, high: int) -> int:
        return int(torch.randint(high, (1,), generator=self._generator))

    def propose(self, view, strategy):
        tokens, parents, rows, depths = [], [], [], []
        for row, room in enumerate(view.room):
            first = len(tokens)
            for _ in range(self._draw(strategy.tokens + 1)):
                parent = self._draw(len(tokens) - first + 1) + first - 1
                depth = 1 if parent < first else depths[parent] + 1
                if depth <= min(strategy.depth, room - 1):
                    tokens.append(self._draw(VOCAB))
                    parents.append(-1 if parent < first else parent)
                    rows.append(row)
                    depths.append(depth)
        return DraftTree.of_lists(tokens, parents, rows, depths)


class Outsider(Recorder):
    """Tokens outside the vocabulary."""

    def propose(self, view, strategy):
        return DraftTree.of_lists([VOCAB], [-1], [0], [1])


class Broken(Recorder):
    """Raises."""

    def propose(self, view, strategy):
        raise RuntimeError("no draft today")


def run(decoder, params, drafter=None, arms=(OFF,), *, max_live=7, items=None):
    items = requests() if items is None else items
    speculation = None
    if drafter is not None:
        speculation = Speculation({drafter.name: drafter}, Cycle(arms), menu=arms)
    engine = RolloutEngine(decoder, max_live=max_live, max_len=MAX_LEN, speculation=speculation)
    waiting, finished, traces = list(items), {}, []

    def pull(wanted: int) -> list[GenerationRequest]:
        taken, waiting[:] = waiting[: min(wanted, 3)], waiting[min(wanted, 3) :]  # requests join in mid-flight
        return taken

    engine.decode(pull, lambda r: finished.__setitem__(r.key, r), params, on_round=traces.append)
    assert len(finished) == len(items)
    return finished, traces, engine


def assert_same(plain, speculative):
    for key, rollout in plain.items():
        other = speculative[key]
        assert other.tokens.tolist() == rollout.tokens.tolist(), key
        assert other.finish == rollout.finish
        torch.testing.assert_close(other.logprobs, rollout.logprobs, atol=1e-4, rtol=0)


PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_new_tokens=40, stop_token_ids=(2,)),
    "T=0.7": SamplingParams(temperature=0.7, max_new_tokens=40, stop_token_ids=(2,)),
    "T=1": SamplingParams(max_new_tokens=40, stop_token_ids=(2, 3)),
    "top-p, top-k": SamplingParams(top_p=0.8, top_k=9, max_new_tokens=30, stop_token_ids=(2,)),
}


@pytest.fixture(scope="module", params=PARAMS, ids=list(PARAMS))
def case(request, decoder):
    params = PARAMS[request.param]
    return params, run(decoder, params)[0]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_right_drafts_change_no_token_and_save_rounds(decoder, case, shape):
    params, plain = case
    speculative, traces, _ = run(decoder, params, Oracle(plain), [shape])
    assert_same(plain, speculative)
    plain_rounds = len(run(decoder, params)[1])
    assert len(traces) < plain_rounds
    emitted = sum(t.tokens for t in traces)
    assert emitted == sum(len(r.completion) for r in plain.values())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_wrong_and_random_drafts_change_no_token(decoder, case, shape):
    params, plain = case
    for drafter in (Oracle(plain, wrong_every=3), Random()):
        assert_same(plain, run(decoder, params, drafter, [shape])[0])


@pytest.mark.parametrize("drafter", [Outsider, Broken])
def test_failing_drafters_change_no_token_and_are_counted(decoder, case, drafter, caplog):
    params, plain = case
    speculative, traces, engine = run(decoder, params, drafter(), [SHAPES[1]])
    assert_same(plain, speculative)
    assert sum(engine.drafter_failures.values()) == len(traces)
    assert sum("failed" in record.message for record in caplog.records) == 1  # said once


def test_switching_at_every_round_changes_no_token(decoder, case):
    params, plain = case
    for max_live in (1, 4, 18):
        drafter = Oracle(plain, wrong_every=4)
        assert_same(plain, run(decoder, params, drafter, [OFF, SHAPES[2], SHAPES[0], OFF, OFF], max_live=max_live)[0])
        assert not drafter.rows, "every request was released"


def test_the_end_of_a_response_inside_a_draft(decoder):
    """Stop token, length limit and cache length all fall inside accepted paths: nothing is emitted beyond them."""
    stops = SamplingParams(max_new_tokens=60, stop_token_ids=(2, 3, 4, 5, 6, 7))
    plain = run(decoder, stops)[0]
    assert FinishReason.STOP in {r.finish for r in plain.values()}
    for limit in (1, 2, 3, 5):
        params = SamplingParams(max_new_tokens=limit)
        short = run(decoder, params)[0]
        assert_same(short, run(decoder, params, Oracle(short), [SHAPES[1]])[0])
    long = SamplingParams(max_new_tokens=500)
    full = run(decoder, long)[0]
    assert {len(r.tokens) for r in full.values()} == {MAX_LEN}
    assert_same(full, run(decoder, long, Oracle(full), [SHAPES[3]])[0])
    assert_same(plain, run(decoder, stops, Oracle(plain), [SHAPES[1]])[0])


def test_recorded_hidden_states_are_those_of_a_plain_pass(decoder):
    """Prefill, plain and speculative rounds together: each position's taps are there, aligned with its token, while the
    request lives and when it ends."""

    class Tapped(Oracle):
        taps = (1, 2, 3)

        def borrow(self, hidden):
            self.hidden, self.seen = hidden, {}

        def read(self, row, length):
            return self.hidden.read(torch.full((length,), row), torch.arange(length))

        def propose(self, view, strategy):
            for row, length in enumerate(view.lengths):
                self.seen.setdefault(self.rows[row], []).append(self.read(row, length - 1))
            return super().propose(view, strategy)

        def release(self, row, tokens):
            self.seen.setdefault(self.rows[row], []).append(self.read(row, len(tokens) - 1))
            super().release(row, tokens)

    params = PARAMS["T=1"]
    plain = run(decoder, params)[0]
    drafter = Tapped(plain, wrong_every=3)
    run(decoder, params, drafter, [SHAPES[2], OFF])
    for key, rollout in plain.items():
        tokens = rollout.tokens.long()

        def attend(layer, q, k, v):
            return torch.nn.functional.scaled_dot_product_attention(
                *(x.transpose(0, 1)[None] for x in (q, k, v)), is_causal=True, enable_gqa=True
            )[0].transpose(0, 1)

        expected = decoder(tokens, torch.arange(len(tokens)), attend, taps=(1, 2, 3)).taps_TE
        assert len(drafter.seen[key][-1]) == len(tokens) - 1  # the newest token never went through the target
        for recorded in drafter.seen[key]:
            torch.testing.assert_close(recorded, expected[: len(recorded)], atol=1e-4, rtol=1e-4)


def test_the_tuner_is_told_what_happened(decoder):
    params = PARAMS["T=1"]
    plain = run(decoder, params)[0]
    shape = SHAPES[1]
    _, traces, engine = run(decoder, params, Oracle(plain), [shape])
    reports = engine.speculation.tuner.reports
    assert [r for _, r in reports] == [t.report for t in traces]
    for rows, report in reports:
        assert len(rows) == report.live == len(report.drafted) == len(report.accepted)
        assert all(0 <= a <= o <= shape.depth for a, o in zip(report.accepted, report.offered, strict=True))
    assert isinstance(traces[0], RoundTrace)
