"""Requests, an engine that decodes them while they arrive, and a drafter that knows the truth.

Imports no configuration: GPU tests need that, too.
"""

import itertools

import torch

from tlt_core.items.speculation import NO_FLOORS, DraftTree
from tlt_core.items.types import GenerationRequest, NoiseKey, Rollout

VOCAB = 64


def requests(count):
    """Of four prompts of 1, 4, 7 and 10 tokens."""
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(3, VOCAB, (1 + 3 * p,), generator=generator).to(torch.int32) for p in range(4)]
    return [GenerationRequest(NoiseKey(0, 1, i % 4, i // 4), prompts[i % 4]) for i in range(count)]


def play(engine, items, params, arrivals=()):
    """arrivals: (round, requests that have come by then); all at once by default.  Responses and rounds."""
    waiting, finished, traces = list(items), {}, []

    def pull(wanted):
        come = next((n for at, n in reversed(arrivals) if len(traces) >= at), len(items))
        free = come - (len(items) - len(waiting))
        taken, waiting[:] = waiting[: min(wanted, free)], waiting[min(wanted, free) :]
        return taken

    engine.decode(pull, lambda r: finished.__setitem__(r.key, r), params, on_round=traces.append)
    assert len(finished) == len(items)
    return finished, traces


class Knows:
    """Drafts the plain response, wrong at every fourth position, beside wrong siblings that come first."""

    name, taps, backlog_s = "knows", (), 0.0

    def __init__(self, plain: dict[NoiseKey, Rollout], *, vocab: int = VOCAB) -> None:
        self._plain, self._vocab = plain, vocab

    def propose(self, view, strategy):
        tokens, parents, rows, depths = [], [], [], []
        for row, (request, length, room) in enumerate(zip(view.requests, view.lengths, view.room, strict=True)):
            parent = -1
            truth = self._plain[request.key].tokens[length:].tolist()
            for depth, right in enumerate(truth[: min(strategy.depth, room - 1)], start=1):
                right = (right + (length + depth) % 4 // 3) % self._vocab
                for wrong in range(strategy.width - 1, -1, -1):
                    tokens.append((right + 9 * wrong) % self._vocab)
                    parents.append(parent), rows.append(row), depths.append(depth)
                parent = len(tokens) - 1
        return DraftTree.of_lists(tokens, parents, rows, depths)

    def admit(self, row, request): ...
    def move(self, source, target): ...
    def release(self, row, tokens): ...


class Cycle:
    """A tuner that goes round its arms: every switch between plain and speculative rounds occurs."""

    floors = NO_FLOORS

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
