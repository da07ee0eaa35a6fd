"""The policy's probability as rollout and verification compute it, and the noise of a token.

    z = logits / T, then top-k, then top-p filtering (filtered tokens get -inf)
    token = arg-max(z + Gumbel noise keyed by (seed, step, prompt, sample, position))
    log p = logits / T - logsumexp(logits / T)           (T = 0: arg-max; log p is then reported at T = 1)

The noise depends on the key alone, so a response does not depend on the batch, the worker or the decoding strategy
that produced it.  log p is that of the policy, before the filters, as the update computes it
(`kernels/sampling/token_logprob`): after them it would be larger by the log of the kept mass, and importance weights
would shrink every gradient by that mass.

Shapes: N positions to sample, one row of logits and one key each; V vocabulary.
"""

from enum import IntEnum, unique
from typing import TypeVar

import torch
from torch import Tensor

from kernels.sampling.coupled_sample import Choice, coupled_race, coupled_sample, runs_native
from tlt_core.items.types import NoiseKey, SamplingParams

_MASK_32, _MASK_64 = (1 << 32) - 1, (1 << 64) - 1
_GOLDEN, _FIRST, _SECOND = -7046029254386353131, -4658895280553007687, -7723592293110705685  # splitmix64's, as signed
_CACHED_SCORES = 1 << 17  # scores worked on together, so that they stay in a CPU's cache


_Words = TypeVar("_Words", int, Tensor)


@unique
class NoiseStep(IntEnum):
    """`NoiseKey.step` of what is no RL step.  RL steps count from 1; see `of_validation`, too."""

    OFFLINE = 0
    DRAFTER_TRIAL = -(1 << 28)
    EXPORT = -(1 << 29)
    WARM_UP = -(1 << 30)


def of_validation(step: int) -> int:
    """`NoiseKey.step` of the validation after RL step `step`."""
    return -1 - step


def stream_key(key: NoiseKey) -> int:
    """Hash a response's key into 64 bits (signed), from which the keys of its positions are made."""
    state = 0
    for word in key:
        state = splitmix64(state ^ (word & _MASK_64))
    return state - (1 << 64) if state >> 63 else state


def splitmix64(state: int) -> int:
    """One step of splitmix64 (Steele, Lea, Flood, OOPSLA 2014), unsigned: neighbours become independent."""
    return _mixed(state + _GOLDEN) & _MASK_64


def row_keys(streams_N: Tensor, positions_N: Tensor) -> Tensor:
    """Key of each position.  streams_N: int64 from `stream_key`; positions_N: int64 index of the token in its sequence
    (prompt included).  Returns [N, 2] int32."""
    state = _mixed(streams_N + positions_N * _GOLDEN)
    return state.contiguous().view(torch.int32).view(*state.shape, 2)


def position_key(stream: int, position: int) -> tuple[int, int]:
    """`row_keys` of one position, in Python integers: the two words as unsigned 32-bit numbers."""
    state = _mixed(stream + position * _GOLDEN)
    return state & _MASK_32, state >> 32 & _MASK_32


def _mixed(state: _Words) -> _Words:
    """splitmix64's finaliser.  int64 tensors wrap around; of an integer, only the lowest 64 bits count."""
    state = (state ^ _shift_right(state, 30)) * _FIRST
    state = (state ^ _shift_right(state, 27)) * _SECOND
    return state ^ _shift_right(state, 31)


def _shift_right(state: _Words, count: int) -> _Words:
    """Logical shift of 64 bits; torch's is arithmetic."""
    return (state >> count) & ((1 << (64 - count)) - 1)


def policy_scores(logits_NV: Tensor, params: SamplingParams) -> Tensor:
    """z of the module docstring: float32 logits after temperature and filters, [N, V]."""
    z = logits_NV.float()
    if params.temperature not in (0.0, 1.0):
        z = z / params.temperature
    if 0 < params.top_k < z.shape[-1]:
        kth = z.topk(params.top_k, dim=-1).values[:, -1:]
        z = z.masked_fill(z < kth, -torch.inf)
    if params.top_p < 1:
        ordered, order = z.sort(dim=-1, descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        dropped = torch.zeros_like(z, dtype=torch.bool).scatter_(-1, order, before >= params.top_p)
        z = z.masked_fill(dropped, -torch.inf)
    return z


def choose(logits_NV: Tensor, keys_N2: Tensor, params: SamplingParams) -> Choice:
    """Sample one token for each position.  logits_NV: any float dtype; keys_N2: from `row_keys`."""
    unfiltered = params.top_p >= 1 and not 0 < params.top_k < logits_NV.shape[-1]
    if logits_NV.device.type != "cpu" or (unfiltered and runs_native(logits_NV)):
        return choose_no_sync(logits_NV, keys_N2, params)
    most = max(1, _CACHED_SCORES // logits_NV.shape[-1])
    parts = zip(logits_NV.split(most), keys_N2.split(most), strict=True)
    chosen = [_choose_for_policy(logits, keys, params) for logits, keys in parts]
    return Choice(*(torch.cat(column) for column in zip(*chosen, strict=True)))


def choose_no_sync(logits_NV: Tensor, keys_N2: Tensor, params: SamplingParams) -> Choice:
    """`choose` by a fixed sequence of operations on the device, whatever the values: a graph can capture it.

    One fused pass where filtering is a floor under the logits.  Top-p is not: it may separate equal logits.
    """
    if params.top_p < 1:
        return _choose_for_policy(logits_NV, keys_N2, params)
    if not 0 < params.top_k < logits_NV.shape[-1]:
        return coupled_sample(logits_NV, keys_N2, temperature=params.temperature)
    floors_N = logits_NV.topk(params.top_k, dim=-1).values[:, -1]
    choice = coupled_sample(logits_NV, keys_N2, temperature=params.temperature, floors_N=floors_N)
    return _before_filters(choice, logits_NV, params)


def _choose_for_policy(logits_NV: Tensor, keys_N2: Tensor, params: SamplingParams) -> Choice:
    return _before_filters(_choose(logits_NV, keys_N2, params), logits_NV, params)


def _before_filters(choice: Choice, logits_NV: Tensor, params: SamplingParams) -> Choice:
    """The same tokens, with their log-probabilities under the policy."""
    if params.temperature == 0 or (params.top_p >= 1 and not 0 < params.top_k < logits_NV.shape[-1]):
        return choice
    lognorms_N = (logits_NV.float() / params.temperature).logsumexp(dim=-1)
    return Choice(choice.tokens_N, choice.logprobs_N + choice.lognorms_N - lognorms_N, lognorms_N)


def _choose(logits_NV: Tensor, keys_N2: Tensor, params: SamplingParams) -> Choice:
    """Log-probabilities are after the filters."""
    z = policy_scores(logits_NV, params)
    p = z.softmax(-1)
    tokens_N = z.argmax(-1) if params.temperature == 0 else coupled_race(p, keys_N2)
    logprobs_N = p.gather(-1, tokens_N[:, None]).squeeze(-1).log()
    return Choice(tokens_N, logprobs_N, z.gather(-1, tokens_N[:, None]).squeeze(-1) - logprobs_N)


def lognorms(logits_NV: Tensor, choice: Choice, params: SamplingParams) -> Tensor:
    """Log-normalisers of softmax(logits), at temperature 1 and without filters, [N] float32."""
    if params.temperature in (0.0, 1.0) and params.top_k == 0 and params.top_p == 1:
        return choice.lognorms_N
    return logits_NV.float().logsumexp(dim=-1)
