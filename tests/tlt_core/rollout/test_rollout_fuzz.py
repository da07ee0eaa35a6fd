"""Any draft trees, and requests that come and end at any time: each is answered once, with the tokens it gets alone."""

import contextlib
import random
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz import cases, fuzz
from tests.tlt_core.rollout.playing import VOCAB, Recorder, play, requests
from tlt_core.items.speculation import NO_MIN_DRAFT_PROBS, OFF, DraftTree, LiveView, RoundReport, Strategy
from tlt_core.items.types import FinishReason, GenerationRequest, NoiseKey, Rollout, SamplingParams
from tlt_core.model.decoder import Decoder
from tlt_core.rollout.draft_check import DraftError, check_tree
from tlt_core.rollout.engine import RolloutEngine, RoundTrace, Speculation

STRATEGIES = (OFF, Strategy("d", 1, 1, 1), Strategy("d", 4, 1, 4), Strategy("d", 3, 3, 8))
LONGEST, MAX_LEN = 10, 32
FAR = 2**63 - 1
SEEDS = st.integers(0, 2**32)
NUMBERS = st.integers(-2, 6) | st.sampled_from([VOCAB - 1, VOCAB, FAR, -FAR])


@cases(few=150, many=2000)
def test_any_arrays_are_a_tree_or_are_refused(count: int) -> None:
    """As the contract of `DraftTree` says, read one token at a time."""

    @fuzz(count)
    @given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.sampled_from(STRATEGIES[1:]), st.data())
    def check(room: list[int], strategy: Strategy, data: st.DataObject) -> None:
        rng = random.Random(data.draw(SEEDS))
        tree = _tree(rng, room, strategy)
        if len(tree[0]) > 1 and rng.random() < 0.5:  # another parent, perhaps in another row
            node = rng.randrange(1, len(tree[0]))
            tree[1][node] = parent = rng.randrange(node)
            tree[3][node] = tree[3][parent] + 1
        spoilt = data.draw(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20), NUMBERS), max_size=2))
        for array, index, value in spoilt:
            if tree[array]:
                tree[array][index % len(tree[array])] = value
        view = LiveView([], torch.zeros(len(room), 1), [1] * len(room), room, torch.zeros(1), SamplingParams())
        allowed = contextlib.nullcontext() if _is_valid(tree, room, strategy) else pytest.raises(DraftError)
        with allowed:
            check_tree(DraftTree.of_lists(*tree), view, strategy, vocab_size=VOCAB)

    check()


@pytest.mark.parametrize("array", DraftTree._fields)
def test_another_type_or_length_is_refused(array: str) -> None:
    good, strategy = DraftTree.of_lists([5, 6], [-1, 0], [0, 0], [1, 2]), STRATEGIES[2]
    view = LiveView([], torch.zeros(1, 1), [1], [9], torch.zeros(1), SamplingParams())
    check_tree(good, view, strategy, vocab_size=VOCAB)
    values = getattr(good, array)
    for wrong in (values.int(), values.double(), values[None], torch.cat([values, values])):
        with pytest.raises(DraftError, match="must be int64 of one length"):
            check_tree(good._replace(**{array: wrong}), view, strategy, vocab_size=VOCAB)


def _tree(
    rng: random.Random, room: list[int], strategy: Strategy, truths: Mapping[int, list[int]] = {}
) -> list[list[int]]:
    """Tokens, parents, rows and depths of a valid tree.  truths: what each row will emit, of which some is guessed."""
    tokens, parents, rows, depths = tree = [[], [], [], []]
    for row, free in enumerate(room):
        first, truth = len(tokens), truths.get(row, [])
        for _ in range(rng.randint(0, strategy.tokens)):
            parent = rng.choice([-1, *range(first, len(tokens))])
            depth = 1 if parent < 0 else depths[parent] + 1
            if depth <= min(strategy.depth, free - 1):
                right = depth <= len(truth) and rng.random() < 0.7
                tokens.append(truth[depth - 1] if right else rng.randrange(VOCAB))
                parents.append(parent), rows.append(row), depths.append(depth)
    return tree


def _is_valid(tree: list[list[int]], room: list[int], strategy: Strategy) -> bool:
    tokens, parents, rows, depths = tree
    for node, (token, parent, row, depth) in enumerate(zip(tokens, parents, rows, depths, strict=True)):
        in_order = node == 0 or rows[node - 1] <= row
        if not (0 <= token < VOCAB and 0 <= row < len(room) and in_order and -1 <= parent < node):
            return False
        above = 0 if parent < 0 else depths[parent]
        if (parent >= 0 and rows[parent] != row) or depth != above + 1:
            return False
        if depth > strategy.depth or depth >= room[row] or rows.count(row) > strategy.tokens:
            return False
    return True


@pytest.fixture(scope="module")
def alone(decoder: Decoder) -> Mapping[NoiseKey, Rollout]:
    """Responses of full length, each decoded by itself and plainly."""
    engine = RolloutEngine(decoder, max_live=1, max_len=MAX_LEN)
    return play(engine, requests(12, lengths=(1, 3, 8, 25)), SamplingParams(max_new_tokens=LONGEST))[0]


class AnyDrafter(Recorder):
    """Guesses right, guesses wrong, proposes nonsense, or fails."""

    def __init__(self, rng: random.Random, alone: Mapping[NoiseKey, Rollout]) -> None:
        super().__init__()
        self._rng, self._alone = rng, alone

    def propose(self, view: LiveView, strategy: Strategy) -> DraftTree:
        assert [r.key for r in view.requests] == [self.rows[row] for row in range(len(view.requests))]
        if (luck := self._rng.random()) < 0.05:
            raise RuntimeError("no draft today")
        known = zip(view.requests, view.lengths, strict=True)
        truths = {row: self._alone[r.key].tokens[length:].tolist() for row, (r, length) in enumerate(known)}
        tree = _tree(self._rng, list(view.room), strategy, truths)
        if luck < 0.15 and tree[0]:
            self._rng.choice(tree)[self._rng.randrange(len(tree[0]))] = self._rng.choice([-2, 99, FAR])
        return DraftTree.of_lists(*tree)


class AnyTuner:
    """Chooses by chance."""

    min_draft_probs = NO_MIN_DRAFT_PROBS

    def __init__(self, rng: random.Random) -> None:
        self._rng, self.numbers = rng, set()

    def choose(self, rows: tuple[int, ...], context: int) -> Strategy:
        assert len(set(rows)) == len(rows)
        self.numbers |= set(rows)
        return self._rng.choice(STRATEGIES)

    def observe(self, rows: tuple[int, ...], report: RoundReport) -> None:
        assert len(rows) == report.live == len(report.drafted) == len(report.offered) == len(report.accepted)
        assert all(a <= o <= d for a, o, d in zip(report.accepted, report.offered, report.drafted, strict=True))

    def forget(self, row: int) -> None:
        self.numbers.remove(row)


@cases(few=25, many=1500)
def test_any_arrivals_ends_and_drafts(count: int, decoder: Decoder, alone: Mapping[NoiseKey, Rollout]) -> None:
    @fuzz(count)
    @given(
        st.lists(st.tuples(st.sampled_from(sorted(alone)), st.none() | st.integers(1, LONGEST + 2)), max_size=9,
                 unique_by=lambda wanted: wanted[0]),
        st.integers(1, 4), st.integers(1, LONGEST), st.sets(st.integers(0, VOCAB - 1), max_size=8),
        SEEDS,
    )  # fmt: skip
    def check(
        wanted: list[tuple[NoiseKey, int | None]], max_live: int, longest: int, stops: set[int], seed: int
    ) -> None:
        rng = random.Random(seed)
        waiting = [
            GenerationRequest(key, alone[key].tokens[: alone[key].prompt_len], max_new_tokens=most)
            for key, most in wanted
        ]
        drafter, tuner = AnyDrafter(rng, alone), AnyTuner(rng)
        speculation = Speculation({"d": drafter}, tuner, STRATEGIES)
        engine = RolloutEngine(decoder, max_live=max_live, max_len=MAX_LEN, speculation=speculation)
        params = SamplingParams(max_new_tokens=longest, stop_token_ids=tuple(stops))
        found: list[Rollout] = []
        rounds: list[RoundTrace] = []

        def on_round(trace: RoundTrace) -> None:
            rounds.append(trace)
            assert len(rounds) <= len(wanted) * longest, "every round emits a token, or more"

        def pull(free: int) -> list[GenerationRequest]:
            assert 0 < free <= max_live
            return [waiting.pop() for _ in range(min(rng.randint(0, free), len(waiting)))]

        for _ in range(1000):  # a phase ends when nothing lives and nothing has come
            engine.decode(pull, found.append, params, on_round=on_round)
            if not waiting:
                break
        assert not waiting
        assert not drafter.rows
        assert not tuner.numbers
        assert sorted(r.key for r in found) == sorted(key for key, _ in wanted)
        for rollout in found:
            _check_answer(rollout, alone[rollout.key], min(dict(wanted)[rollout.key] or longest, longest), stops)

    check()


def _check_answer(found: Rollout, alone: Rollout, most: int, stops: set[int]) -> None:
    """The response that is decoded alone, up to its first stop token or its limit."""
    completion = alone.completion.tolist()[:most]
    stop = next((i for i, token in enumerate(completion) if token in stops), None)
    expected = completion if stop is None else completion[: stop + 1]
    assert found.completion.tolist() == expected
    assert found.finish == (FinishReason.LENGTH if stop is None else FinishReason.STOP)
    # float32; sums over the vocabulary and the keys go in another order when requests share a pass
    torch.testing.assert_close(found.logprobs, alone.logprobs[: len(expected)], atol=1e-4, rtol=1e-4)
