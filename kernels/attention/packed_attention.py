"""Causal attention over packed sequences: each token sees the earlier tokens of its own sequence, nothing else.

Math, for token t of a sequence that starts at s:  out_t = sum_{s <= j <= t} p_tj v_j,
p_t = softmax_j(q_t . k_j / sqrt(d)), query head h reading key/value head h // (H / K).  With g = d loss / d out:
    dv_j = sum_t p_tj g_t      ds_tj = p_tj (g_t . v_j - sum_i p_ti g_t . v_i) / sqrt(d)
    dq_t = sum_j ds_tj k_j     dk_j = sum_t ds_tj q_t

A sequence may have more keys than queries (`key_offsets_S1`): the last query then sees all keys of its sequence, the
one before it all but the last, and so on.  So responses share a prompt's keys, gathered in front of their own.

Shapes: T tokens of all sequences, S sequences, H query heads, K key/value heads, G = H / K, d head size; L tokens of
one sequence, N queries of one block, E keys that it sees, B blocks of a group.
"""

import importlib.util
import inspect
import logging
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Impl = Literal["auto", "sdpa", "blocked", "flash", "varlen"]
_BLOCK = 128  # queries in one block; larger blocks waste more scores above the diagonal
_GROUP_SCORES = 1 << 19  # of the blocks that share products, so that they stay in a CPU's cache
_PADDED = 1.4  # times as many scores as without padding, at most

_log = logging.getLogger(__name__)


def packed_causal_attention(
    q_THd: Tensor,
    k_TKd: Tensor,
    v_TKd: Tensor,
    offsets_S1: Tensor,
    *,
    key_offsets_S1: Tensor | None = None,
    together: bool = False,
    impl: Impl = "auto",
) -> Tensor:
    """Differentiable; returns [T, H, d].  offsets_S1: start of each sequence, and T at the end (best on the CPU).

    key_offsets_S1: the same for keys and values, if they differ; a sequence needs at least as many keys as queries.

    together: in `blocked`, sequences of like length share products, padded to the longest: quicker, but a sequence's
    last bits then depend on the others.

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
        bounds = tuple(offsets_S1.tolist()), tuple(key_offsets_S1.tolist())
        plan = _plan(*bounds, q_THd.shape[1], k_TKd.shape[1], q_THd.dtype, together)
        out_THd: Tensor = _Blocked.apply(q_THd, k_TKd, v_TKd, plan)
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

    @property
    def shape(self) -> tuple[int, int]:
        return self.keys.stop - self.keys.start, self.queries.stop - self.queries.start


class _Group(NamedTuple):
    """Blocks that share products, padded: rows of [T + 1, H] and [T + 1, K], of which the last one is zero."""

    blocks: list[_Block]
    queries_BHN: Tensor  # int64
    keys_BKE: Tensor  # int64
    bias_B1NE: Tensor  # 0, or -inf where a query does not see a key


class _Plan(NamedTuple):
    groups: list[_Group]
    places_TH: Tensor  # of each query in the groups' queries, one group after the other


class _Blocked(torch.autograd.Function):
    """Plain batched products, which oneDNN runs on bfloat16 matrix instructions; torch's CPU flash kernel does not.

    Scores are rounded to bfloat16 before the softmax, which works in float32.  This does not make log-probabilities
    less accurate: other bfloat16 roundings dominate.  Backward computes probabilities again, so nothing quadratic is
    kept.
    """

    @staticmethod
    def forward(ctx: Any, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, plan: _Plan) -> Tensor:
        ctx.save_for_backward(q_THd, k_TKd, v_TKd)
        ctx.plan = plan
        queries, keys, values = (_padded(x) for x in (q_THd, k_TKd, v_TKd))
        parts = []
        for group in plan.groups:
            p_MNE = _probabilities(_queries(queries, group), _keys(keys, group), group)
            parts.append(torch.bmm(p_MNE, _keys(values, group)))
        return _unpadded(parts, plan).view(q_THd.shape)

    @staticmethod
    def backward(ctx: Any, grad_THd: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # type: ignore[override]
        q_THd, k_TKd, v_TKd = ctx.saved_tensors
        scale = q_THd.shape[2] ** -0.5
        queries, keys, values, grads = (_padded(x) for x in (q_THd, k_TKd, v_TKd, grad_THd))
        # In float32, because several blocks add to the gradient of a key.
        dk_TKd, dv_TKd = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (k_TKd, v_TKd))
        parts = []
        for group in ctx.plan.groups:
            queries_MNd, grads_MNd = _queries(queries, group), _queries(grads, group)
            keys_MEd, values_MEd = _keys(keys, group), _keys(values, group)
            p_MNE = _probabilities(queries_MNd, keys_MEd, group)
            _add_keys(dv_TKd, torch.bmm(p_MNE.mT, grads_MNd), group)
            dp_MNE = torch.bmm(grads_MNd, values_MEd.mT)
            ds_MNE = torch.ops.aten._softmax_backward_data(dp_MNE, p_MNE, -1, p_MNE.dtype)
            parts.append(_scaled_bmm(ds_MNE, keys_MEd, scale))
            _add_keys(dk_TKd, _scaled_bmm(ds_MNE.mT, queries_MNd, scale), group)
        dq_THd = _unpadded(parts, ctx.plan).view(q_THd.shape)
        return dq_THd, dk_TKd.to(k_TKd.dtype), dv_TKd.to(v_TKd.dtype), None


@lru_cache(maxsize=4)  # all layers of a pass ask for the same
def _plan(
    bounds: tuple[int, ...], key_bounds: tuple[int, ...], heads: int, num_kv: int, dtype: torch.dtype, together: bool
) -> _Plan:
    blocks = list(_blocks(bounds, key_bounds))
    shared = _alike(blocks, heads) if together else [[block] for block in blocks]
    groups = [_group(own, (bounds[-1], key_bounds[-1]), heads, num_kv, dtype) for own in shared]
    rows = torch.cat([group.queries_BHN.flatten() for group in groups])
    places = torch.empty((bounds[-1] + 1) * heads, dtype=torch.int64)  # of the zero row, too
    places[rows] = torch.arange(len(rows))
    return _Plan(groups, places[: bounds[-1] * heads])


def _blocks(bounds: tuple[int, ...], key_bounds: tuple[int, ...]) -> Iterator[_Block]:
    for (start, end), (key_start, key_end) in zip(pairwise(bounds), pairwise(key_bounds), strict=True):
        for first in range(start, end, _BLOCK):
            last = min(first + _BLOCK, end)
            yield _Block(slice(first, last), slice(key_start, key_end - (end - last)))


def _alike(blocks: list[_Block], heads: int) -> list[list[_Block]]:
    groups: list[list[_Block]] = [[]]
    for block in sorted(blocks, key=lambda block: block.shape, reverse=True):
        own = [*groups[-1], block]
        keys, queries = (max(sizes) for sizes in zip(*(b.shape for b in own), strict=True))
        padded = len(own) * keys * queries
        if len(own) > 1 and (
            padded * heads > _GROUP_SCORES or padded > _PADDED * sum(b.shape[0] * b.shape[1] for b in own)
        ):
            own = [block]
            groups.append(own)
        groups[-1] = own
    return groups


def _group(blocks: list[_Block], zero_rows: tuple[int, int], heads: int, num_kv: int, dtype: torch.dtype) -> _Group:
    seen_B1, rows_B1 = torch.tensor([block.shape for block in blocks]).T[..., None]
    first_B1, first_key_B1 = torch.tensor([(b.queries.start, b.keys.start) for b in blocks]).T[..., None]
    n_N, e_E = torch.arange(int(rows_B1.max())), torch.arange(int(seen_B1.max()))
    queries_BN = torch.where(n_N < rows_B1, first_B1 + n_N, zero_rows[0])
    keys_BE = torch.where(e_E < seen_B1, first_key_B1 + e_E, zero_rows[1])
    last_BN = torch.minimum(seen_B1 - rows_B1 + n_N, seen_B1 - 1)
    hidden_BNE = e_E > last_BN[..., None]
    return _Group(
        blocks,
        queries_BN[:, None] * heads + torch.arange(heads)[:, None],
        keys_BE[:, None] * num_kv + torch.arange(num_kv)[:, None],
        torch.zeros(hidden_BNE.shape, dtype=dtype).masked_fill_(hidden_BNE, -torch.inf)[:, None],
    )


def _padded(x_THd: Tensor) -> Tensor:
    """[(T + 1) H, d], with a row of zeros."""
    return torch.cat([x_THd.reshape(-1, x_THd.shape[2]), x_THd.new_zeros(x_THd.shape[1:])])


def _queries(x: Tensor, group: _Group) -> Tensor:
    """Of `_padded` rows: [B K, G N, d], the G heads of a key/value head one after the other."""
    return x.index_select(0, group.queries_BHN.flatten()).view(group.keys_BKE.shape[:2].numel(), -1, x.shape[1])


def _keys(x: Tensor, group: _Group) -> Tensor:
    """[B K, E, d]"""
    return x.index_select(0, group.keys_BKE.flatten()).view(-1, group.keys_BKE.shape[2], x.shape[1])


def _unpadded(parts_MNd: list[Tensor], plan: _Plan) -> Tensor:
    """The inverse of `_queries` for all groups, [T H, d]."""
    return torch.cat([part.flatten(0, 1) for part in parts_MNd]).index_select(0, plan.places_TH)


def _add_keys(x_TKd: Tensor, parts_MEd: Tensor, group: _Group) -> None:
    for block, part_KEd in zip(group.blocks, parts_MEd.unflatten(0, (len(group.blocks), -1)), strict=True):
        x_TKd[block.keys] += part_KEd[:, : block.shape[0]].transpose(0, 1)


def _probabilities(queries_MNd: Tensor, keys_MEd: Tensor, group: _Group) -> Tensor:
    """Causal softmax of the group's scores, [B K, G N, E]."""
    scores_MNE = _scaled_bmm(queries_MNd, keys_MEd.mT, queries_MNd.shape[-1] ** -0.5)
    blocks, _, rows, seen = group.bias_B1NE.shape
    scores_MNE.view(blocks, -1, rows, seen).add_(group.bias_B1NE)
    return scores_MNE.softmax(-1)


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
