"""Requests, an engine that decodes them while they arrive, and drafters and tuners made up for it.

Imports no configuration: GPU tests need that, too.
"""

import itertools

import torch

from tlt_core.items.speculation import NO_MIN_DRAFT_PROBS, DraftTree, LiveView, Strategy
from tlt_core.items.types import GenerationRequest, NoiseKey, Rollout, SamplingParams

VOCAB = 64
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_new_tokens=40, stop_token_ids=(2,)),
    "T=0.7": SamplingParams(temperature=0.7, max_new_tokens=40, stop_token_ids=(2,)),
    "T=1": SamplingParams(max_new_tokens=40, stop_token_ids=(2, 3, 30)),
    "top-p, top-k": SamplingParams(top_p=0.8, top_k=9, max_new_tokens=30, stop_token_ids=(2,)),
}


def requests(count, *, lengths=(1, 4, 7, 10), step=1):
    """Of prompts of these lengths, in turn."""
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(3, VOCAB, (n,), generator=generator).to(torch.int32) for n in lengths]
    kinds = len(lengths)
    return [GenerationRequest(NoiseKey(0, step, i % kinds, i // kinds), prompts[i % kinds]) for i in range(count)]


def play(engine, items, params, arrivals=(), *, on_round=lambda trace: None, **options):
    """arrivals: (round, requests that have come by then); all at once by default.  Responses and rounds."""
    waiting, finished, traces = list(items), {}, []

    def pull(wanted):
        come = next((n for at, n in reversed(arrivals) if len(traces) >= at), len(items))
        free = come - (len(items) - len(waiting))
        taken, waiting[:] = waiting[: min(wanted, free)], waiting[min(wanted, free) :]
        return taken

    def ended(trace):
        traces.append(trace)
        on_round(trace)

    engine.decode(pull, lambda r: finished.__setitem__(r.key, r), params, on_round=ended, **options)
    assert len(finished) == len(items)
    return finished, traces


def assert_same(plain, other):
    """Tokens are equal; log-probs as far as two batch sizes make them."""
    assert plain.keys() == other.keys()
    for key, rollout in plain.items():
        assert other[key].tokens.tolist() == rollout.tokens.tolist(), key
        assert other[key].finish == rollout.finish
        torch.testing.assert_close(other[key].logprobs, rollout.logprobs, atol=1e-4, rtol=0)


class Recorder:
    """Base of drafters: remembers which request is in which row."""

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

    def __init__(self, plain: dict[NoiseKey, Rollout], *, wrong_every: int = 0, vocab: int = VOCAB) -> None:
        super().__init__()
        self.plain, self.wrong_every, self.vocab = plain, wrong_every, vocab

    def propose(self, view: LiveView, strategy: Strategy) -> DraftTree:
        tokens, parents, rows, depths = [], [], [], []
        for row, (request, length, room) in enumerate(zip(view.requests, view.lengths, view.room, strict=True)):
            truth = self.plain[request.key].tokens[length:].tolist()
            parent, first = -1, len(tokens)
            for depth in range(1, min(strategy.depth, room - 1) + 1):
                if len(truth) < depth:  # beyond the end: anything goes
                    truth.append(5)
                right = truth[depth - 1]
                if self.wrong_every and (length + depth) % self.wrong_every == 0:
                    right = (right + 1) % self.vocab
                siblings = [(right + 7 * k) % self.vocab for k in range(strategy.width - 1, -1, -1)]
                for token in siblings:
                    if len(tokens) - first < strategy.tokens:
                        tokens.append(token), parents.append(parent), rows.append(row), depths.append(depth)
                if len(tokens) - first >= strategy.tokens:
                    break
                parent = len(tokens) - 1  # the right one comes last
        return DraftTree.of_lists(tokens, parents, rows, depths)


class Knows(Oracle):
    """Wrong at every fourth position."""

    name = "knows"

    def __init__(self, plain: dict[NoiseKey, Rollout], *, vocab: int = VOCAB) -> None:
        super().__init__(plain, wrong_every=4, vocab=vocab)


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


class Broken(Recorder):
    """Raises."""

    def propose(self, view, strategy):
        raise RuntimeError("no draft today")


class Cycle:
    """A tuner that goes round its arms: every switch between plain and speculative rounds occurs."""

    min_draft_probs = NO_MIN_DRAFT_PROBS

    def __init__(self, arms) -> None:
        self._arms = itertools.cycle(arms)
        self.reports = []

    def choose(self, rows, context):
        assert len(set(rows)) == len(rows)
        return next(self._arms)

    def observe(self, rows, report):
        self.reports.append((tuple(rows), report))

    def forget(self, row):
        self.last_forgotten = row
