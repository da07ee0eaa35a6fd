"""Keyed Gumbel arg-max: exact sampling whose noise is a pure function of a key and a token id.

Math.  With i.i.d. Gumbel noise g_v, arg-max_v (z_v + g_v) is an exact sample of softmax(z) (Gumbel-max trick).
Here g_v = -log(-log1p(-u_v)), u_v = hash(key, v) in (0, 1), so everyone who knows the key computes the same noise.  A
drafter can therefore propose with the target's own noise (Daliri, Musco, Suresh, arXiv 2408.07978), and a response does
not depend on the batch, the worker or the strategy that produced it.

The hash is counter based: two 32-bit key words are injected before and between the two multiplications of the
murmur3 finaliser, whose counter is the token id.  u has 31 bits, mapped to float32 so that the *small* values, which
win, keep full resolution: the noise is exact down to probabilities of about 2^-32.

`coupled_sample` chooses in one pass over the logits.  With z = logits / temperature, and -inf below a position's
floor, the token is arg-max_v (z_v + g_v); at temperature 0 it is arg-max_v z_v, where z are the logits.  Its
log-probability is z_token - logsumexp(z).

Across devices, the hash's integers are equal, and so is z: Triton and the CPU both round the division correctly.
Logarithms differ: Triton computes log1p(-u) as log(w) (-u) / (w - 1) with w = 1 - u, and each device has its own log.
Noise agrees to 2e-6, so tokens agree unless the two best scores are closer than 4e-6: about one position in 250,000.

Shapes: N positions to sample, one row of logits and one key each; V vocabulary, S splits of the vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.dispatch import Impl, jit, native_library, power_of_two, tl, uses_triton

_GOLDEN = 0x9E3779B1 - (1 << 32)  # as signed 32-bit
_MIX_1 = 0x85EBCA6B - (1 << 32)
_MIX_2 = 0xC2B2AE35 - (1 << 32)
_SCALE = 2.0**-31
_LARGEST_U = 1.0 - 2.0**-24


def gumbel_noise(keys_N2: Tensor, ids_V: Tensor) -> Tensor:
    """Noise of every position for the given token ids.

    keys_N2: int32.  ids_V: [V] int32 token ids (any subset, any order), or [N, V]: a set for each position.
    Returns [N, V] float32 Gumbel noise, between -2.9 and 22.2.
    """
    return exponential_noise(keys_N2, ids_V).log_().neg_()


def exponential_noise(keys_N2: Tensor, ids_V: Tensor) -> Tensor:
    """w = exp(-g) of `gumbel_noise`, which is exponentially distributed: [N, V] float32, between 2.3e-10 and 16.7."""
    bits = ids_V.mul(_GOLDEN) ^ keys_N2[:, :1]
    shifted = torch.empty_like(bits)  # fresh memory in every line would cost more than the arithmetic
    bits ^= torch.bitwise_right_shift(bits, 16, out=shifted).bitwise_and_(0xFFFF)
    bits *= _MIX_1
    bits ^= keys_N2[:, 1:]
    bits ^= torch.bitwise_right_shift(bits, 13, out=shifted).bitwise_and_(0x7FFFF)
    bits *= _MIX_2
    bits ^= torch.bitwise_right_shift(bits, 16, out=shifted).bitwise_and_(0xFFFF)
    bits &= 0x7FFFFFFF
    u = bits.to(torch.float32).add_(0.5).mul_(_SCALE).clamp_(max=_LARGEST_U)
    return u.neg_().log1p_().neg_()


def coupled_argmax(scores_NV: Tensor, keys_N2: Tensor, ids_V: Tensor) -> Tensor:
    """arg-max over V of scores + noise: an exact sample of softmax(scores).  Returns [N] int64 columns."""
    return gumbel_noise(keys_N2, ids_V).add_(scores_NV).argmax(dim=-1)


def coupled_race(p_NV: Tensor, keys_N2: Tensor) -> Tensor:
    """arg-max over V of p / w, which is arg-max of log p + g, as g = -log w: no logarithm of the vocabulary.

    p_NV: float32 probabilities.  Returns [N] int64 columns.  The two forms round differently and may differ where the
    two best scores are within 1e-6.
    """
    ids = torch.arange(p_NV.shape[-1], dtype=torch.int32, device=p_NV.device)
    return (p_NV / exponential_noise(keys_N2, ids)).argmax(-1)


class Choice(NamedTuple):
    """Tokens chosen for N positions."""

    tokens_N: Tensor  # int64
    logprobs_N: Tensor  # float32, log softmax(z) of the token: under the sampling policy
    lognorms_N: Tensor  # float32, logsumexp(z)


def coupled_sample(
    logits_NV: Tensor,
    keys_N2: Tensor,
    *,
    temperature: float = 1.0,
    floors_N: Tensor | None = None,
    impl: Impl = "auto",
) -> Choice:
    """See the module docstring.  logits_NV: any float dtype, last axis contiguous; keys_N2: int32.

    floors_N: the lowest logit of each position that may be drawn, for top-k.  It is divided by the temperature as well,
    so logits that become equal are kept or dropped together.

    Raises RuntimeError where logsumexp is not finite (NaN, +inf, nothing left).  On a GPU the assertion runs on the
    device and is raised by the next synchronisation, so the check needs none.
    """
    if uses_triton(impl, logits_NV, op="coupled_sample"):
        sampled = _coupled_sample_triton(logits_NV, keys_N2, temperature, floors_N)
    elif impl != "torch" and runs_native(logits_NV) and floors_N is None:
        sampled = _coupled_sample_native(logits_NV, keys_N2, temperature)
    else:
        sampled = coupled_sample_reference(logits_NV, keys_N2, temperature=temperature, floors_N=floors_N)
    torch._assert_async(sampled.lognorms_N.isfinite().all(), "coupled_sample: logits are NaN, +inf or all -inf")
    return sampled


def runs_native(logits_NV: Tensor) -> bool:
    """Whether `coupled_sample` has C for such logits (without floors)."""
    return logits_NV.dtype == torch.bfloat16 and native_library("auto", logits_NV, op="coupled_sample") is not None


def _coupled_sample_native(logits_NV: Tensor, keys_N2: Tensor, temperature: float) -> Choice:
    library = native_library("native", logits_NV, op="coupled_sample")
    assert library is not None, "native_library raises when it is missing"
    logits_NV, keys_N2 = logits_NV.contiguous(), keys_N2.contiguous()
    tokens_N = torch.empty(len(logits_NV), dtype=torch.int64)
    logprobs_N, lognorms_N = torch.empty(2, len(logits_NV)).unbind()
    library.tlt_choose(
        logits_NV.data_ptr(), keys_N2.data_ptr(), *logits_NV.shape, temperature,
        tokens_N.data_ptr(), logprobs_N.data_ptr(), lognorms_N.data_ptr(),
    )  # fmt: skip
    return Choice(tokens_N, logprobs_N, lognorms_N)


def coupled_sample_reference(
    logits_NV: Tensor, keys_N2: Tensor, *, temperature: float, floors_N: Tensor | None
) -> Choice:
    divisor = temperature or 1.0
    z = logits_NV.float() / divisor
    if floors_N is not None:
        z = z.masked_fill(z < (floors_N.float() / divisor)[:, None], -torch.inf)
    ids = torch.arange(z.shape[-1], dtype=torch.int32, device=z.device)
    tokens_N = z.argmax(-1) if temperature == 0 else coupled_argmax(z, keys_N2, ids)
    lognorms_N = z.logsumexp(-1)
    return Choice(tokens_N, z.gather(-1, tokens_N[:, None]).squeeze(-1) - lognorms_N, lognorms_N)


_BLOCK = 2048  # logits that a program holds in registers
_PROGRAMS = 512  # wanted in flight: a few for each multiprocessor of a large GPU
_MOST_SPLITS = 64


def _coupled_sample_triton(logits_NV: Tensor, keys_N2: Tensor, temperature: float, floors_N: Tensor | None) -> Choice:
    num_rows, vocab = logits_NV.shape
    device = logits_NV.device
    tokens_N = torch.empty(num_rows, dtype=torch.int64, device=device)
    logprobs_N, lognorms_N = torch.empty(2, num_rows, dtype=torch.float32, device=device)
    if num_rows == 0:
        return Choice(tokens_N, logprobs_N, lognorms_N)
    assert logits_NV.stride(1) == 1, f"coupled_sample: logits with strides {logits_NV.stride()}: make them contiguous"
    keys_N2 = keys_N2.contiguous()
    blocks = -(-vocab // _BLOCK)
    chunk = -(-blocks // min(_MOST_SPLITS, max(1, _PROGRAMS // num_rows), blocks)) * _BLOCK
    splits = -(-vocab // chunk)
    parts_4NS = torch.empty(4, num_rows, splits, dtype=torch.float32, device=device)
    columns_NS = torch.empty(num_rows, splits, dtype=torch.int32, device=device)
    _choose_in_split[(num_rows, splits)](
        logits_NV, keys_N2, logits_NV if floors_N is None else floors_N.contiguous(), parts_4NS, columns_NS,
        vocab, logits_NV.stride(0), chunk, splits, num_rows * splits, float(temperature),
        GREEDY=temperature == 0, SCALED=temperature not in (0.0, 1.0), FLOORED=floors_N is not None, BLOCK=_BLOCK,
    )  # fmt: skip
    _choose_among_splits[(num_rows,)](
        parts_4NS, columns_NS, tokens_N, logprobs_N, lognorms_N, splits, num_rows * splits, SPLITS=power_of_two(splits)
    )
    return Choice(tokens_N, logprobs_N, lognorms_N)


@jit("splits", "plane")
def _choose_in_split(
    logits, keys, floors, parts, columns,
    vocab, row_stride, chunk, splits, plane, temperature,
    GREEDY: tl.constexpr, SCALED: tl.constexpr, FLOORED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of one row and one part of the vocabulary: best score, its column and z, maximum of z and sum of exp(z - max)."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    key_0 = tl.load(keys + 2 * row).to(tl.uint32, bitcast=True)
    key_1 = tl.load(keys + 2 * row + 1).to(tl.uint32, bitcast=True)
    if FLOORED:
        floor = tl.load(floors + row).to(tl.float32)
        if SCALED:
            floor = tl.math.div_rn(floor, temperature + tl.zeros_like(floor))
    best, best_z, column = float("-inf"), float("-inf"), split * chunk
    top, total = float("-inf"), 0.0
    for first in range(split * chunk, tl.minimum(split * chunk + chunk, vocab), BLOCK):
        ids = first + tl.arange(0, BLOCK)
        z = tl.load(logits + row * row_stride + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
        if SCALED:
            z = tl.math.div_rn(z, temperature + tl.zeros_like(z))
        if FLOORED:
            z = tl.where(z < floor, float("-inf"), z)
        score = z if GREEDY else z + _gumbel(ids, key_0, key_1)
        block_best, at = tl.max(score, axis=0, return_indices=True)
        better = block_best > best  # the first of equals stays
        best = tl.where(better, block_best, best)
        column = tl.where(better, first + at, column)
        best_z = tl.where(better, tl.max(tl.where(ids == first + at, z, float("-inf")), axis=0), best_z)
        new_top = tl.maximum(top, tl.max(z, axis=0))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        total = total * tl.exp(top - shift) + tl.sum(tl.exp(z - shift), axis=0)
        top = new_top
    at_part = parts + row * splits + split
    tl.store(at_part, best)
    tl.store(at_part + plane, best_z)
    tl.store(at_part + 2 * plane, top)
    tl.store(at_part + 3 * plane, total)
    tl.store(columns + row * splits + split, column)


@jit("splits", "plane")
def _choose_among_splits(parts, columns, tokens, logprobs, lognorms, splits, plane, SPLITS: tl.constexpr):
    row, split = tl.program_id(0).to(tl.int64), tl.arange(0, SPLITS)
    used = split < splits
    at_part = parts + row * splits + split
    best = tl.load(at_part, mask=used, other=float("-inf"))
    winner = tl.argmax(best, axis=0)
    z = tl.max(tl.where(split == winner, tl.load(at_part + plane, mask=used, other=0.0), float("-inf")), axis=0)
    tops = tl.load(at_part + 2 * plane, mask=used, other=float("-inf"))
    totals = tl.load(at_part + 3 * plane, mask=used, other=0.0)
    top = tl.max(tops, axis=0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    lognorm = shift + tl.log(tl.sum(totals * tl.exp(tops - shift), axis=0))
    tl.store(tokens + row, tl.load(columns + row * splits + winner).to(tl.int64))
    tl.store(logprobs + row, z - lognorm)
    tl.store(lognorms + row, lognorm)


@jit()
def _gumbel(ids, key_0, key_1):
    u = _hash(ids, key_0, key_1).to(tl.float32)
    u = tl.minimum((u + 0.5) * 4.656612873077393e-10, 0.99999994)  # 2^-31, 1 - 2^-24
    w = 1.0 - u
    off = tl.where(w == 1.0, 1.0, w - 1.0)
    log1p = tl.where(w == 1.0, -u, tl.log(w) * tl.math.div_rn(-u, off))
    return -tl.log(-log1p)


@jit()
def _hash(ids, key_0, key_1):
    """31 bits of each token id, in unsigned integers, whose right shift is the logical one."""
    bits = (ids.to(tl.uint32) * 0x9E3779B1) ^ key_0
    bits ^= bits >> 16
    bits = bits * 0x85EBCA6B
    bits ^= key_1
    bits ^= bits >> 13
    bits = bits * 0xC2B2AE35
    bits ^= bits >> 16
    return bits & 0x7FFFFFFF
