"""Requests, and an engine that decodes them while they arrive.  Imports no configuration: GPU tests need that, too."""

import torch

from tlt_core.types import GenerationRequest, NoiseKey

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

    engine.generate(pull, lambda r: finished.__setitem__(r.key, r), params, on_round=traces.append)
    assert len(finished) == len(items)
    return finished, traces
