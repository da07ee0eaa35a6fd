"""The drafter against a reference without caches; catching up, moving rows, swapping weights; the ranking."""

import itertools

import pytest
import torch

from kernels.attention.packed_attention import packed_causal_attention
from kernels.sampling.coupled_sample import gumbel_noise
from tests.tlt_core.drafter.eagle3.reference import lively_model, paths, propose
from tlt_core.drafter.eagle3.drafter import Eagle3Drafter
from tlt_core.drafter.eagle3.files import export_weights
from tlt_core.drafter.eagle3.tree import TreeBuilder, draft_keys, perturbed_scores
from tlt_core.items.hidden_states import HiddenStates
from tlt_core.items.speculation import LiveView, MinDraftProbs, Strategy
from tlt_core.items.types import GenerationRequest, NoiseKey, SamplingParams
from tlt_core.model.config import ModelError
from tlt_core.model.load import random_decoder
from tlt_core.model.sampling import choose, row_keys, stream_key
from tlt_core.rollout.draft_check import check_tree

MAX_LEN = 96
IDS = torch.tensor([0, 2, 3, 5, 7, 8, 11, 13, 20, 21, 30, 41, 42, 50, 61, 63])
CHAIN, TREE = Strategy("eagle3", 5, 1, 5), Strategy("eagle3", 4, 3, 10)


@pytest.fixture(scope="module")
def decoder(tiny_config):
    decoder = random_decoder(tiny_config, seed=0, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if not name.endswith("norm.weight"):
                parameter *= 15
    return decoder


@pytest.fixture(scope="module")
def model(tiny_config):
    return lively_model(tiny_config, IDS)


def taps_of(decoder, tokens):
    def attend(layer, q, k, v):
        return packed_causal_attention(q, k, v, torch.tensor([0, len(tokens)]))

    with torch.inference_mode():
        return decoder(tokens, torch.arange(len(tokens)), attend, taps=(0, 1, 2)).taps_TE.clone()


def hidden_states(decoder, max_live, max_len=MAX_LEN):
    """As an engine's; every value not recorded is not a number."""
    hidden = HiddenStates(
        (0, 1, 2),
        hidden_size=decoder.config.hidden_size,
        max_live=max_live,
        max_len=max_len,
        dtype=decoder.head_weight.dtype,
        device=decoder.head_weight.device,
    )
    hidden.taps_SCE.fill_(torch.nan)
    return hidden


def move(drafter, source, target):
    """As the engine does it."""
    drafter._hidden.move(source, target)
    drafter.move(source, target)


class Bench:
    """Rows of random tokens, as the engine would tell a drafter about them."""

    def __init__(self, decoder, lengths, *, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.tokens = [torch.randint(0, 64, (MAX_LEN,), generator=generator) for _ in lengths]
        self.taps = [taps_of(decoder, tokens) for tokens in self.tokens]
        self.decoder = decoder
        self.keys = [NoiseKey(seed, 1, row, 0) for row in range(len(lengths))]
        self.lengths = list(lengths)

    def admit(self, drafter):
        drafter.borrow(hidden_states(self.decoder, len(self.keys) + 1))
        for row, key in enumerate(self.keys):
            drafter.admit(row, GenerationRequest(key, self.tokens[row][:1].int()))

    def record(self, drafter, row, start, end, *, place=None):
        positions = torch.arange(start, end).flip(0)  # the order is free
        rows = torch.full_like(positions, row if place is None else place)
        drafter._hidden.record(rows, positions, self.taps[row][positions])

    def view(self, params, *, rows=None, room=None):
        rows = list(range(len(self.lengths))) if rows is None else rows
        tokens = torch.full((len(rows), MAX_LEN), 63)
        for place, row in enumerate(rows):
            tokens[place, : self.lengths[row]] = self.tokens[row][: self.lengths[row]]
        return LiveView(
            requests=[GenerationRequest(self.keys[row], self.tokens[row][:1].int()) for row in rows],
            tokens_BC=tokens,
            lengths=[self.lengths[row] for row in rows],
            room=[50] * len(rows) if room is None else room,
            streams_B=torch.tensor([stream_key(self.keys[row]) for row in rows]),
            params=params,
        )

    def expected(self, model, decoder, view, place, row, strategy):
        tokens, taps = self.tokens[row][: self.lengths[row]].tolist(), self.taps[row]
        stream = int(view.streams_B[place])
        embedding = decoder.embed_tokens.weight
        return propose(model, embedding, tokens, taps, stream, view.params, strategy, view.room[place])


def ready(bench, model, decoder, **settings):
    drafter = Eagle3Drafter(model, decoder, max_live=len(bench.lengths) + 1, max_len=MAX_LEN, **settings)
    bench.admit(drafter)
    for row, length in enumerate(bench.lengths):
        bench.record(drafter, row, 0, length - 1)
    return drafter


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


SAMPLINGS = {
    "greedy": SamplingParams(temperature=0),
    "T1": SamplingParams(),
    "top_k": SamplingParams(temperature=0.7, top_k=5),
    "top_p": SamplingParams(top_p=0.6),
}


@pytest.mark.parametrize("strategy", [CHAIN, TREE, Strategy("eagle3", 3, 2, 14), Strategy("eagle3", 6, 4, 3)], ids=str)
@pytest.mark.parametrize("params", SAMPLINGS.values(), ids=SAMPLINGS)
def test_proposals_equal_a_recomputation_without_caches(decoder, model, strategy, params):
    bench = Bench(decoder, [7, 2, 12, 5])
    drafter = ready(bench, model, decoder)
    room = [50, 50, 3, 1]
    for grown in (0, 3):  # a second proposal, after the first one's drafts were overwritten
        for row in range(4):
            bench.record(drafter, row, bench.lengths[row] - 1, bench.lengths[row] - 1 + grown)
            bench.lengths[row] += grown
        view = bench.view(params, room=room)
        tree = drafter.propose(view, strategy)
        check_tree(tree, view, strategy, vocab_size=64)
        assert set(tree.tokens_N.tolist()) <= set(IDS.tolist())
        for row in range(4):
            assert paths(tree, row) == set(bench.expected(model, decoder, view, row, row, strategy)), row
        assert not paths(tree, 3)  # room for one token: nothing to draft
        assert max(len(path) for path in paths(tree, 2)) <= 2


@pytest.mark.parametrize("strategy", [CHAIN, TREE], ids=str)
def test_catching_up_late_equals_keeping_up(decoder, model, strategy):
    """Long stretches (packed pass) and short ones (padded pass), and rows of very different need."""
    late, early = Bench(decoder, [60, 70, 3]), Bench(decoder, [4, 35, 3])
    keeping = ready(early, model, decoder)
    while early.lengths != late.lengths:
        keeping.propose(early.view(SamplingParams()), strategy)
        for row, (length, goal) in enumerate(zip(early.lengths, late.lengths, strict=True)):
            end = min(length + 4, goal)
            early.record(keeping, row, length - 1, end - 1)
            early.lengths[row] = end
    view = late.view(SamplingParams())
    catching = ready(late, model, decoder)
    assert same(catching.propose(view, strategy), keeping.propose(view, strategy))
    for row in range(3):
        assert paths(catching.propose(view, strategy), row) == set(
            late.expected(model, decoder, view, row, row, strategy)
        )


def test_rows_move_and_are_used_again(decoder, model):
    bench = Bench(decoder, [6, 8, 10])
    drafter = ready(bench, model, decoder)
    params = SamplingParams()
    drafter.propose(bench.view(params), CHAIN)
    bench.record(drafter, 2, 9, 13)  # known, not yet caught up
    bench.lengths[2] = 14
    drafter.release(0, bench.tokens[0][:6].int())
    move(drafter, 2, 0)
    view = bench.view(params, rows=[2, 1])
    tree = drafter.propose(view, TREE)
    for place, row in enumerate([2, 1]):
        assert paths(tree, place) == set(bench.expected(model, decoder, view, place, row, TREE))
    # A new request in the place that was given up, and one more round of the others.
    drafter.admit(2, GenerationRequest(bench.keys[0], bench.tokens[0][:1].int()))
    bench.record(drafter, 0, 0, 5, place=2)
    bench.record(drafter, 2, 13, 15, place=0)
    bench.lengths[2] = 16
    view = bench.view(params, rows=[2, 1, 0])
    tree = drafter.propose(view, TREE)
    for place, row in enumerate([2, 1, 0]):
        assert paths(tree, place) == set(bench.expected(model, decoder, view, place, row, TREE))


def test_nothing_to_draft_from_or_for(decoder, model):
    bench = Bench(decoder, [1, 5])
    drafter = ready(bench, model, decoder)
    assert not len(drafter.propose(bench.view(SamplingParams(), room=[9, 1]), CHAIN).tokens_N)
    tree = drafter.propose(bench.view(SamplingParams()), TREE)  # a row of one token has no position to run
    view = bench.view(SamplingParams())
    assert paths(tree, 0) == set()
    assert paths(tree, 1) == set(bench.expected(model, decoder, view, 1, 1, TREE))


def test_new_weights_are_used_at_once(decoder, model, tiny_config):
    bench = Bench(decoder, [6, 8])
    drafter, view = ready(bench, model, decoder), bench.view(SamplingParams())
    before = drafter.propose(view, CHAIN)
    other = lively_model(tiny_config, IDS + torch.tensor([0] * 15 + [-1]), seed=9)
    drafter.load_weights(export_weights(other))
    assert paths(drafter.propose(view, TREE), 1) == set(bench.expected(other, decoder, view, 1, 1, TREE))
    # Refused as a whole; and a spell of weights that are not numbers leaves nothing behind.
    broken = export_weights(model) | {"lm_head.weight": torch.zeros(3, 3)}
    with pytest.raises(ModelError, match="lm_head"):
        drafter.load_weights(broken)
    assert paths(drafter.propose(view, TREE), 1) == set(bench.expected(other, decoder, view, 1, 1, TREE))
    nan = {n: x * torch.nan if x.is_floating_point() else x for n, x in export_weights(model).items()}
    drafter.load_weights(nan)
    for strategy in (CHAIN, TREE):
        check_tree(drafter.propose(view, strategy), view, strategy, vocab_size=64)
    drafter.load_weights(export_weights(model))
    assert same(drafter.propose(view, CHAIN), before)


def test_coupled_first_child_of_a_perfect_drafter_is_the_targets_choice():
    """Same distribution, same noise: the same token, at every temperature and with every filter."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(400, 64, generator=generator) * 2
    lengths, streams = torch.randint(2, 500, (400,), generator=generator), torch.randint(-(2**62), 2**62, (400,))
    for params in (
        SamplingParams(temperature=0),
        SamplingParams(),
        SamplingParams(temperature=0.6, top_p=0.8),
        SamplingParams(temperature=1.3, top_k=7),
    ):
        view = LiveView([], torch.zeros(400, 1), lengths.tolist(), [9] * 400, streams, params)
        keys, ids = draft_keys(view, lengths, depth=3), torch.arange(64, dtype=torch.int32)
        for level in range(3):
            noise = gumbel_noise(keys[:, level], ids) if params.temperature else None
            target = choose(logits, row_keys(streams, lengths + level), params).tokens_N
            for width in (1, 4):
                tree = TreeBuilder(400, width=width, error_scale=1.0)
                columns = tree.add_level(perturbed_scores(logits, noise, params))
                assert torch.equal(columns.view(400, width)[:, 0], target)


@pytest.mark.parametrize("width", [1, 3])
def test_what_reaches_the_floor_by_hand(width):
    """One row, two levels: the value of a node is the product of softmax shares along its path."""
    generator = torch.Generator().manual_seed(5)
    first, second = torch.randn(1, 1, 6, generator=generator) * 2, torch.randn(1, width, 6, generator=generator) * 2
    shares, below = first[0, 0].softmax(-1), second[0].softmax(-1)
    top = shares.topk(width).indices.tolist()
    values = {(token,): float(shares[token]) for token in top}
    for place, token in enumerate(top):
        for child in below[place].topk(width).indices.tolist():
            values[token, child] = float(shares[token] * below[place, child])
    for least, level in itertools.product((0.01, 0.05, 0.2, 0.5), (0.0, 0.3, 0.8)):
        tree = TreeBuilder(1, width=width, error_scale=1.0, min_draft_probs=MinDraftProbs(least, level))
        tree.add_level(first)
        promised = sum(values[token,] for token in top if values[token,] >= least)
        assert tree.is_hopeless() == (promised <= level)
        tree.choose_beam()
        tree.add_level(second)
        found = paths(tree.finish(torch.arange(6), torch.tensor([9]), tokens=99), 0)
        assert set(found) == {path for path, value in values.items() if value >= least}


def test_catching_up_is_not_the_price_of_drafting(decoder, model):
    """Positions decoded without the drafter are paid once, and said apart: a probe would else look dear."""
    bench = Bench(decoder, [40])
    drafter = ready(bench, model, decoder)
    drafter.propose(bench.view(SamplingParams()), CHAIN)
    assert drafter.backlog_s > 0
    bench.record(drafter, 0, 39, 41)
    bench.lengths[0] = 42
    drafter.propose(bench.view(SamplingParams()), CHAIN)
    assert drafter.backlog_s == 0
