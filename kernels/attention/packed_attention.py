"""Causal attention over packed sequences: each token sees the earlier tokens of its own sequence, nothing else.

Math, for token t of a sequence that starts at s:  out_t = sum_{s <= j <= t} p_tj v_j,
p_t = softmax_j(q_t . k_j / sqrt(d)), query head h reading key/value head h // (H / K).  With g = d loss / d out:
    dv_j = sum_t p_tj g_t      ds_tj = p_tj (g_t . v_j - sum_i p_ti g_t . v_i) / sqrt(d)
    dq_t = sum_j ds_tj k_j     dk_j = sum_t ds_tj q_t

A sequence may have more keys than queries (`key_offsets_S1`): the last query then sees all keys of its sequence, the
one before it all but the last, and so on.  So responses share a prompt's keys, gathered in front of their own.

Shapes: T tokens of all sequences, S sequences, H query heads, K key/value heads, G = H / K, d head size; L tokens of
one sequence, N queries of one block (all G heads of a key/value head), E keys that a block sees.
"""

import importlib.util
import inspect
import logging
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Impl = Literal["auto", "sdpa", "blocked", "flash", "varlen"]
_BLOCK = 128  # queries in one block; larger blocks waste more scores above the diagonal

_log = logging.getLogger(__name__)


def packed_causal_attention(
    q_THd: Tensor,
    k_TKd: Tensor,
    v_TKd: Tensor,
    offsets_S1: Tensor,
    *,
    key_offsets_S1: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Differentiable; returns [T, H, d].  offsets_S1: start of each sequence, and T at the end (best on the CPU).

    key_offsets_S1: the same for keys and values, if they differ; a sequence needs at least as many keys as queries.

    sdpa: torch's kernel, one call per sequence.  blocked: the bfloat16 matrix instructions of a CPU.  flash: CUDA with
    the flash-attn package; raises ImportError without it.  varlen: torch's own copy of it.  auto: flash or else varlen
    in half precision on CUDA; blocked in bfloat16 on a CPU; sdpa otherwise.
    """
    chosen = _choose(q_THd.device.type, q_THd.dtype) if impl == "auto" else impl
    key_offsets_S1 = offsets_S1 if key_offsets_S1 is None else key_offsets_S1
    if chosen == "flash":
        return _flash(q_THd, k_TKd, v_TKd, offsets_S1, key_offsets_S1)
    if chosen == "varlen":
        return _varlen(q_THd, k_TKd, v_TKd, offsets_S1, key_offsets_S1)
    if chosen == "blocked":
        blocks = list(_blocks(offsets_S1.tolist(), key_offsets_S1.tolist()))
        out_THd: Tensor = _Blocked.apply(q_THd, k_TKd, v_TKd, blocks)
        return out_THd
    return packed_causal_attention_reference(q_THd, k_TKd, v_TKd, offsets_S1, key_offsets_S1)


def packed_causal_attention_reference(
    q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, offsets_S1: Tensor, key_offsets_S1: Tensor
) -> Tensor:
    """One scaled-dot-product call per sequence; scores in float32, grouped heads without copies of keys and values."""
    lengths, key_lengths = offsets_S1.diff().tolist(), key_offsets_S1.diff().tolist()
    # split instead of slices: the backward of each slice would fill a gradient of all sequences.
    split = ((q_THd, lengths), (k_TKd, key_lengths), (v_TKd, key_lengths))
    sequences = zip(*(torch.split(x.transpose(0, 1), sizes, 1) for x, sizes in split), strict=True)
    return torch.cat([_causal_sdpa(*sequence) for sequence in sequences], dim=1).transpose(0, 1)


def _causal_sdpa(q_HLd: Tensor, k_KEd: Tensor, v_KEd: Tensor) -> Tensor:
    """One sequence whose last query sees all keys."""
    count, seen = q_HLd.shape[1], k_KEd.shape[1]
    mask = None if count == seen else torch.ones(count, seen, dtype=torch.bool, device=q_HLd.device).tril(seen - count)
    return F.scaled_dot_product_attention(
        q_HLd[None], k_KEd[None], v_KEd[None], attn_mask=mask, is_causal=mask is None, enable_gqa=True
    )[0]


class _Block(NamedTuple):
    """Some queries of a sequence and the keys that they may see, which end at the queries' own positions."""

    queries: slice
    keys: slice


class _Blocked(torch.autograd.Function):
    """Plain batched products, which oneDNN runs on bfloat16 matrix instructions; torch's CPU flash kernel does not.

    Scores are rounded to bfloat16 before the softmax, which works in float32.  This does not make log-probabilities
    less accurate: other bfloat16 roundings dominate.  Backward computes probabilities again, so nothing quadratic is
    kept.
    """

    @staticmethod
    def forward(ctx: Any, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, blocks: list[_Block]) -> Tensor:
        ctx.save_for_backward(q_THd, k_TKd, v_TKd)
        ctx.blocks = blocks
        out_THd = torch.empty_like(q_THd, memory_format=torch.contiguous_format)
        num_kv = k_TKd.shape[1]
        for block in blocks:
            keys_KEd, values_KEd = (x[block.keys].transpose(0, 1) for x in (k_TKd, v_TKd))
            p_KNE = _probabilities(_queries(q_THd, block, num_kv), keys_KEd, block)
            _put_queries(out_THd, torch.bmm(p_KNE, values_KEd), block)
        return out_THd

    @staticmethod
    def backward(ctx: Any, grad_THd: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # type: ignore[override]
        q_THd, k_TKd, v_TKd = ctx.saved_tensors
        num_kv, scale = k_TKd.shape[1], q_THd.shape[2] ** -0.5
        dq_THd = torch.empty_like(q_THd, memory_format=torch.contiguous_format)
        # In float32, because several blocks add to the gradient of a key.
        dk_TKd, dv_TKd = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (k_TKd, v_TKd))
        for block in ctx.blocks:
            seen = block.keys
            keys_KEd, values_KEd = (x[seen].transpose(0, 1) for x in (k_TKd, v_TKd))
            queries_KNd, grads_KNd = _queries(q_THd, block, num_kv), _queries(grad_THd, block, num_kv)
            p_KNE = _probabilities(queries_KNd, keys_KEd, block)
            dv_TKd[seen] += torch.bmm(p_KNE.mT, grads_KNd).transpose(0, 1)
            dp_KNE = torch.bmm(grads_KNd, values_KEd.mT)
            ds_KNE = torch.ops.aten._softmax_backward_data(dp_KNE, p_KNE, -1, p_KNE.dtype)
            _put_queries(dq_THd, _scaled_bmm(ds_KNE, keys_KEd, scale), block)
            dk_TKd[seen] += _scaled_bmm(ds_KNE.mT, queries_KNd, scale).transpose(0, 1)
        return dq_THd, dk_TKd.to(k_TKd.dtype), dv_TKd.to(v_TKd.dtype), None


def _blocks(bounds: list[int], key_bounds: list[int]) -> Iterator[_Block]:
    for (start, end), (key_start, key_end) in zip(pairwise(bounds), pairwise(key_bounds), strict=True):
        for first in range(start, end, _BLOCK):
            last = min(first + _BLOCK, end)
            yield _Block(slice(first, last), slice(key_start, key_end - (end - last)))


def _queries(x_THd: Tensor, block: _Block, num_kv: int) -> Tensor:
    """The block's queries, [K, N, d]: the G heads of a key/value head one after the other."""
    return x_THd[block.queries].unflatten(1, (num_kv, -1)).permute(1, 2, 0, 3).flatten(1, 2)


def _put_queries(x_THd: Tensor, rows_KNd: Tensor, block: _Block) -> None:
    """The inverse of `_queries`, in place."""
    target = x_THd[block.queries].unflatten(1, (rows_KNd.shape[0], -1))
    target.copy_(rows_KNd.unflatten(1, (-1, len(target))).permute(2, 0, 1, 3))


def _probabilities(queries_KNd: Tensor, keys_KEd: Tensor, block: _Block) -> Tensor:
    """Causal softmax of the block's scores, [K, N, E]."""
    num_rows = block.queries.stop - block.queries.start
    scores_KNE = _scaled_bmm(queries_KNd, keys_KEd.mT, queries_KNd.shape[-1] ** -0.5)
    square = scores_KNE[..., -num_rows:].unflatten(1, (-1, num_rows))  # [K, G, rows, rows]
    square += torch.full((num_rows, num_rows), -torch.inf, dtype=square.dtype, device=square.device).triu_(1)
    return scores_KNE.softmax(-1)


def _scaled_bmm(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """scale * a b, rounded once."""
    out = a.new_empty(a.shape[0], a.shape[1], b.shape[2])
    return torch.baddbmm(out, a, b, beta=0, alpha=scale, out=out)


def _flash(q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, offsets_S1: Tensor, key_offsets_S1: Tensor) -> Tensor:
    from flash_attn import flash_attn_varlen_func  # aligns its causal mask at the end, too (since 2.1)

    out_THd: Tensor = flash_attn_varlen_func(
        q_THd, k_TKd, v_TKd, *_on_device(q_THd, offsets_S1, key_offsets_S1), causal=True
    )
    return out_THd


def _varlen(q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, offsets_S1: Tensor, key_offsets_S1: Tensor) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {"window_size": (-1, 0)}  # causal, aligned at the end
    if _takes_groups(varlen_attn):
        options["enable_gqa"] = True
    else:  # torch 2.11 wants as many keys and values as queries
        k_TKd, v_TKd = (x.repeat_interleave(q_THd.shape[1] // x.shape[1], dim=1) for x in (k_TKd, v_TKd))
    out_THd = varlen_attn(q_THd, k_TKd, v_TKd, *_on_device(q_THd, offsets_S1, key_offsets_S1), **options)
    assert isinstance(out_THd, Tensor), "no second result was asked for"
    return out_THd


@cache
def _takes_groups(attention: Callable[..., Any]) -> bool:
    return "enable_gqa" in inspect.signature(attention).parameters


def _on_device(q_THd: Tensor, offsets_S1: Tensor, key_offsets_S1: Tensor) -> tuple[Tensor, Tensor, int, int]:
    """Offsets where the queries are, and the longest sequences."""
    queries, keys = (x.to(q_THd.device, torch.int32) for x in (offsets_S1, key_offsets_S1))
    return queries, keys, int(offsets_S1.diff().max()), int(key_offsets_S1.diff().max())


@cache
def _choose(device_type: str, dtype: torch.dtype) -> Impl:
    """What `auto` means.  Cached, so that the choice is logged once per kind of input."""
    chosen: Impl = "sdpa"
    if device_type == "cpu" and dtype == torch.bfloat16:
        chosen = "blocked"
    elif device_type == "cuda" and dtype != torch.float32:
        chosen = "varlen" if importlib.util.find_spec("flash_attn") is None else "flash"
    _log.info("packed attention on %s in %s: %s", device_type, dtype, chosen)
    return chosen
