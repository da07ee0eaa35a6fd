"""What this machine computes in a second, measured in about one second.

    a training pass, from the caller -> train_flops    products of a decode step -> read_bytes (one token), decode_flops

The threads of all workers run at the same time, because workers share memory, caches and, on some machines, the units
that multiply.
"""

import functools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F

from kernels.layers.packed_linear import Panels, can_pack_panels

_PROBE_S = 0.25  # for each of the three
_WEIGHT_BYTES = 48 << 20  # weights of a worker's decode step, more than its share of the caches
_FURTHER = 16  # tokens of a decode step besides the first


class MakePass(Protocol):
    """Makes a training pass of a layer; returns it with its floating-point operations."""

    def __call__(self, *, width: int, inner: int, dtype: torch.dtype) -> tuple[Callable[[], object], float]:
        """A pass of one thread."""


class Rates(NamedTuple):
    """Rates of one worker while the others are as busy."""

    train_flops: float  # FLOP/s of a training pass
    read_bytes: float  # bytes/s of weights, for one token
    decode_flops: float  # FLOP/s of further tokens in a decode step, which reads the weights anyway


@functools.cache
def measure(
    make_pass: MakePass, *, workers: int, threads: int, width: int, inner: int, update_dtype: str, rollout_dtype: str
) -> Rates:
    """Measure.  make_pass: makes a training pass.  width, inner: hidden and intermediate size of the model, which give
    the products their shapes."""
    update, rollout = getattr(torch, update_dtype), getattr(torch, rollout_dtype)
    before, barrier = torch.get_num_threads(), threading.Barrier(workers)

    def probe(_: int) -> Rates:
        torch.set_num_threads(threads)
        train, train_flops = make_pass(width=width, inner=inner, dtype=update)
        linear, num_bytes = _decode_product(width, rollout)
        one, several = torch.ones(1, width, dtype=rollout), torch.ones(1 + _FURTHER, width, dtype=rollout)
        train_s = _seconds(train, barrier)
        one_s = _seconds(lambda: linear(one), barrier)
        several_s = _seconds(lambda: linear(several), barrier)
        flops = 2 * _FURTHER * num_bytes / rollout.itemsize
        # With matrix tiles a further token may cost nothing and the difference is noise: a share of the pass bounds it.
        further_s = max(several_s - one_s, several_s / _FURTHER)
        return Rates(train_flops / train_s, num_bytes / one_s, flops / further_s)

    try:
        with ThreadPoolExecutor(workers) as pool:
            found = list(pool.map(probe, range(workers)))
    finally:
        torch.set_num_threads(before)
    return Rates(*(sum(column) / workers for column in zip(*found, strict=True)))


def _decode_product(width: int, dtype: torch.dtype) -> tuple[Callable[[torch.Tensor], torch.Tensor], int]:
    weight = torch.ones(_WEIGHT_BYTES // (width * dtype.itemsize), width, dtype=dtype)
    num_bytes = weight.numel() * weight.element_size()
    if dtype == torch.bfloat16 and can_pack_panels(weight):
        return Panels(weight), num_bytes
    return functools.partial(F.linear, weight=weight), num_bytes


def _seconds(call: Callable[[], object], barrier: threading.Barrier) -> float:
    """Seconds of one call while the other workers make theirs."""
    call()
    barrier.wait()
    began_s, calls = time.perf_counter(), 0
    while (elapsed_s := time.perf_counter() - began_s) < _PROBE_S or not calls:
        call()
        calls += 1
    return elapsed_s / calls
