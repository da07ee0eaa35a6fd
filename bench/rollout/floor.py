"""The time of one pass of the target, beside the least that it can take on this machine.

    weights      bytes of all projections / measured memory bandwidth: a pass reads them once
    arithmetic   2 x parameters x tokens / measured peak of a large product
    linears      measured time of the projections alone

A pass over few tokens is bound by the weights.  With many tokens arithmetic dominates, and each draft token costs time.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from bench.timing import median_s
from tlt_core.model.decoder import Decoder
from tlt_core.model.packed import PackedLinear
from tlt_core.rollout.engine import RolloutEngine

_BUFFER_BYTES = 1 << 29
_PEAK_TOKENS = 512
_TRIALS = 9


class Machine(NamedTuple):
    """Ceilings of this machine with the threads in use."""

    bytes_per_s: float  # the faster of a large copy (read and written) and a large sum (read)
    flops_per_s: float  # largest projection times 512 tokens, in the weights' dtype


class PassCost(NamedTuple):
    """Seconds of one pass; medians."""

    live: int
    tokens: int  # of all requests together
    pass_s: float  # with attention, sampling and commit
    linears_s: float
    weights_s: float
    arithmetic_s: float


def projections(decoder: Decoder) -> list[nn.Module]:
    """All linear maps of a pass, the LM head last."""
    linears = [module for module in decoder.layers.modules() if isinstance(module, nn.Linear | PackedLinear)]
    if decoder.packed_head is not None:
        return [*linears, decoder.packed_head]
    head = nn.Linear(1, 1, bias=False)
    head.weight = nn.Parameter(decoder.head_weight, requires_grad=False)
    return [*linears, head]


def _shape(linear: nn.Module) -> tuple[int, int]:
    rows, columns = linear.shape if isinstance(linear, PackedLinear) else cast(Tensor, linear.weight).shape
    return int(rows), int(columns)


@torch.inference_mode()
def ceilings(decoder: Decoder) -> Machine:
    """Measure; takes about two seconds."""
    buffer = torch.ones(_BUFFER_BYTES // 4)
    other = torch.empty_like(buffer)
    copied = 2 * _BUFFER_BYTES / median_s(lambda: other.copy_(buffer), trials=_TRIALS)
    read = _BUFFER_BYTES / median_s(buffer.sum, trials=_TRIALS)
    largest = max(projections(decoder)[:-1], key=lambda linear: _shape(linear)[0] * _shape(linear)[1])
    rows, columns = _shape(largest)
    inputs = torch.randn(_PEAK_TOKENS, columns).to(decoder.head_weight.dtype)
    flops = 2.0 * rows * columns * _PEAK_TOKENS
    return Machine(max(copied, read), flops / median_s(lambda: largest(inputs), trials=_TRIALS))


@torch.inference_mode()
def linears_s(decoder: Decoder, tokens: int) -> float:
    """Seconds of only the projections of one pass over `tokens` tokens."""
    dtype = decoder.head_weight.dtype
    work: list[tuple[nn.Module, Tensor]] = []
    for linear in projections(decoder):
        work.append((linear, torch.randn(tokens, _shape(linear)[1]).to(dtype)))
    return median_s(lambda: [linear(x) for linear, x in work], trials=_TRIALS)


def pass_costs(
    engine: RolloutEngine, machine: Machine, points: Sequence[tuple[int, int]], *, context: int
) -> list[PassCost]:
    """Costs for pairs (live, tokens), with requests of `context` tokens.  The engine must be empty."""
    decoder = engine.decoder
    parameters = sum(rows * columns for rows, columns in map(_shape, projections(decoder)))
    weights_s = parameters * decoder.head_weight.element_size() / machine.bytes_per_s
    costs = []
    for live, tokens in points:
        pass_s = median_s(functools.partial(engine.rehearse, live, tokens, context), trials=_TRIALS)
        arithmetic_s = 2.0 * parameters * tokens / machine.flops_per_s
        costs.append(PassCost(live, tokens, pass_s, linears_s(decoder, tokens), weights_s, arithmetic_s))
    return costs
