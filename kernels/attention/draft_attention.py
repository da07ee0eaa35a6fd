"""Attention of drafts that start at every position of a sequence at once (EAGLE-3's training-time test).

Query n of a sequence sees a prefix of the sequence's keys, one key more than query n - 1, and its own keys: those of
the tokens drafted since.  With `first` the last key that query 0 sees, and J(n) the own keys of query n:

    out_n = sum_{j <= first + n} p_nj v_j + sum_{j in J(n)} p_nj v'_nj        p_n = softmax over both of q_n . k
    with g = d loss / d out:    ds_nj = p_nj (g_n . v_j - g_n . out_n)
    dq_n = sum_j ds_nj k_j      dk_j = sum_n ds_nj q_n      dv_j = sum_n p_nj g_n       (own keys: of query n alone)

Scores are computed for a few queries at a time, which stay in the second-level cache, and again in backward.

Shapes: T queries of all sequences, R keys of all sequences, N queries of a block, E keys that a block sees, K key/value
heads, G query heads for each, M = G N, k own keys, d head size.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

Impl = Literal["auto", "torch", "blocked"]
_BLOCK = 32  # queries: with 9 heads and 300 keys their scores take 350 kB
_REFERENCE_BLOCK = 256  # queries; larger blocks waste more scores above the diagonal


class Reach(NamedTuple):
    """What the queries of one sequence see."""

    rows: int  # queries of the sequence
    keys: int  # of the sequence
    first: int  # index of the last key that query 0 sees; negative: it sees only its own


def draft_attention(
    q_TKGd: Tensor,
    keys_RKd: Tensor,
    values_RKd: Tensor,
    own_TKkd: Tensor,
    own_values_TKkd: Tensor,
    reaches: Sequence[Reach],
    *,
    impl: Impl = "auto",
) -> Tensor:
    """Differentiable; returns [T, K, G, d].  q: already scaled.  Float32 or float64.

    reaches: one per sequence, in the order of queries and keys.  auto: blocked on a CPU, elsewhere torch (the
    specification).
    """
    if impl == "blocked" or (impl == "auto" and q_TKGd.device.type == "cpu"):
        out_TKGd: Tensor = _Blocked.apply(q_TKGd, keys_RKd, values_RKd, own_TKkd, own_values_TKkd, reaches)
        return out_TKGd
    return draft_attention_reference(q_TKGd, keys_RKd, values_RKd, own_TKkd, own_values_TKkd, reaches)


def draft_attention_reference(
    q_TKGd: Tensor,
    keys_RKd: Tensor,
    values_RKd: Tensor,
    own_TKkd: Tensor,
    own_values_TKkd: Tensor,
    reaches: Sequence[Reach],
) -> Tensor:
    """The specification, by autograd."""
    rows, ends = [r.rows for r in reaches], [r.keys for r in reaches]
    # split instead of slices: the backward of each slice would fill a gradient of all sequences.
    by_query = (x.split(rows) for x in (q_TKGd, own_TKkd, own_values_TKkd))
    by_key = (x.split(ends) for x in (keys_RKd, values_RKd))
    out = []
    for reach, *queries, keys, values in zip(reaches, *by_query, *by_key, strict=True):
        blocks = zip(*(x.split(_REFERENCE_BLOCK) for x in queries), strict=True)
        for index, (q, own, own_values) in enumerate(blocks):
            first = reach.first + index * _REFERENCE_BLOCK
            seen = slice(0, max(first + len(q), 0))
            out.append(_reference_block(q, keys[seen], values[seen], own, own_values, first=first))
    return torch.cat(out)


def _reference_block(
    q_NKGd: Tensor, keys_EKd: Tensor, values_EKd: Tensor, own_NKkd: Tensor, own_values_NKkd: Tensor, *, first: int
) -> Tensor:
    """Query n sees the keys up to `first` + n, and its own; [N, K, G, d]."""
    q_KGNd = q_NKGd.permute(1, 2, 0, 3)
    shared = torch.matmul(q_KGNd, keys_EKd.permute(1, 2, 0)[:, None])  # [K, G, N, E]
    hidden_NE = torch.ones(shared.shape[-2:], dtype=torch.bool, device=q_NKGd.device).triu(first + 1)
    shared = shared.masked_fill(hidden_NE, -torch.inf)
    own = torch.einsum("kgnd,nkjd->kgnj", q_KGNd, own_NKkd)
    weights = torch.cat([shared, own], dim=-1).softmax(-1).to(q_NKGd.dtype)
    seen, recent = weights.split([shared.shape[-1], own.shape[-1]], dim=-1)
    out = torch.matmul(seen, values_EKd.transpose(0, 1)[:, None])
    out = out + torch.einsum("kgnj,nkjd->kgnd", recent, own_values_NKkd)
    return out.permute(2, 0, 1, 3)


class _Block(NamedTuple):
    rows: slice  # of T
    keys: slice  # of R; those that the last query sees


class _Blocked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_TKGd: Tensor,
        keys_RKd: Tensor,
        values_RKd: Tensor,
        own_TKkd: Tensor,
        own_values_TKkd: Tensor,
        reaches: Sequence[Reach],
    ) -> Tensor:
        out_TKGd, lognorms_TKG = torch.empty_like(q_TKGd), q_TKGd.new_empty(q_TKGd.shape[:3])
        keys_KRd, values_KRd = (x.transpose(0, 1) for x in (keys_RKd, values_RKd))
        blocks = list(_blocks(reaches))
        for block in blocks:
            q_KMd, own_NKGk = _queries(q_TKGd, block), _own_scores(q_TKGd, own_TKkd, block)
            shared_KME = _shared_scores(q_KMd, keys_KRd[:, block.keys], block)
            lognorms_NKG = torch.logaddexp(own_NKGk.logsumexp(-1), _by_row(shared_KME.logsumexp(-1), block))
            _to_shares(shared_KME, own_NKGk, lognorms_NKG)
            out_NKGd = torch.einsum("nkgj,nkjd->nkgd", own_NKGk, own_values_TKkd[block.rows])
            out_NKGd += _by_row(torch.bmm(shared_KME, values_KRd[:, block.keys]), block)
            out_TKGd[block.rows], lognorms_TKG[block.rows] = out_NKGd, lognorms_NKG
        ctx.save_for_backward(q_TKGd, keys_RKd, values_RKd, own_TKkd, own_values_TKkd, out_TKGd, lognorms_TKG)
        ctx.blocks = blocks
        return out_TKGd

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad_TKGd,) = grads
        q_TKGd, keys_RKd, values_RKd, own_TKkd, own_values_TKkd, out_TKGd, lognorms_TKG = ctx.saved_tensors
        dq_TKGd, down_TKkd, down_values_TKkd = (torch.empty_like(x) for x in (q_TKGd, own_TKkd, own_values_TKkd))
        keys_KRd, values_KRd = (x.transpose(0, 1) for x in (keys_RKd, values_RKd))
        dkeys_KRd, dvalues_KRd = (x.new_zeros(x.shape) for x in (keys_KRd, values_KRd))
        for block in ctx.blocks:
            seen, rows = block.keys, block.rows
            q_KMd, own_NKGk = _queries(q_TKGd, block), _own_scores(q_TKGd, own_TKkd, block)
            shared_KME = _shared_scores(q_KMd, keys_KRd[:, seen], block)
            _to_shares(shared_KME, own_NKGk, lognorms_TKG[rows])
            grad_NKGd, grad_KMd = grad_TKGd[rows], _queries(grad_TKGd, block)
            common_NKG = (grad_NKGd * out_TKGd[rows]).sum(-1)  # g . out
            dvalues_KRd[:, seen] += torch.bmm(shared_KME.mT, grad_KMd)
            dshared_KME = torch.bmm(grad_KMd, values_KRd[:, seen].mT)
            dshared_KME.sub_(_by_head(common_NKG)[..., None]).mul_(shared_KME)
            dkeys_KRd[:, seen] += torch.bmm(dshared_KME.mT, q_KMd)
            down_values_TKkd[rows] = torch.einsum("nkgj,nkgd->nkjd", own_NKGk, grad_NKGd)
            down_NKGk = torch.einsum("nkgd,nkjd->nkgj", grad_NKGd, own_values_TKkd[rows])
            down_NKGk.sub_(common_NKG[..., None]).mul_(own_NKGk)
            down_TKkd[rows] = torch.einsum("nkgj,nkgd->nkjd", down_NKGk, q_TKGd[rows])
            dq_NKGd = torch.einsum("nkgj,nkjd->nkgd", down_NKGk, own_TKkd[rows])
            dq_TKGd[rows] = dq_NKGd + _by_row(torch.bmm(dshared_KME, keys_KRd[:, seen]), block)
        dkeys_RKd, dvalues_RKd = dkeys_KRd.transpose(0, 1), dvalues_KRd.transpose(0, 1)
        return dq_TKGd, dkeys_RKd, dvalues_RKd, down_TKkd, down_values_TKkd, None


def _blocks(reaches: Sequence[Reach]) -> Iterator[_Block]:
    row = key = 0
    for reach in reaches:
        for start in range(0, reach.rows, _BLOCK):
            count = min(_BLOCK, reach.rows - start)
            seen = max(reach.first + start + count, 0)
            yield _Block(slice(row + start, row + start + count), slice(key, key + seen))
        row, key = row + reach.rows, key + reach.keys


def _queries(x_TKGd: Tensor, block: _Block) -> Tensor:
    """The block's queries, [K, M, d]: the G heads of a key/value head one after the other."""
    return x_TKGd[block.rows].permute(1, 2, 0, 3).flatten(1, 2)


def _by_row(x_KM: Tensor, block: _Block) -> Tensor:
    """[K, M, ...] -> [N, K, G, ...]."""
    rows = block.rows.stop - block.rows.start
    x_KGN = x_KM.unflatten(1, (-1, rows))
    return x_KGN.movedim(2, 0)


def _by_head(x_NKG: Tensor) -> Tensor:
    """[N, K, G] -> [K, M]."""
    return x_NKG.permute(1, 2, 0).flatten(1, 2)


def _own_scores(q_TKGd: Tensor, own_TKkd: Tensor, block: _Block) -> Tensor:
    """[N, K, G, k]."""
    return torch.einsum("nkgd,nkjd->nkgj", q_TKGd[block.rows], own_TKkd[block.rows])


def _shared_scores(q_KMd: Tensor, keys_KEd: Tensor, block: _Block) -> Tensor:
    """[K, M, E], -inf where a query does not see a key: above the diagonal that ends at the last key."""
    scores_KME = torch.bmm(q_KMd, keys_KEd.mT)
    rows = block.rows.stop - block.rows.start
    width = min(rows, scores_KME.shape[2])
    corner = scores_KME[..., scores_KME.shape[2] - width :].unflatten(1, (-1, rows))  # [K, G, N, width]
    above = torch.full((rows, width), -torch.inf, dtype=corner.dtype, device=corner.device)
    corner += above.triu_(width - rows + 1)
    return scores_KME


def _to_shares(shared_KME: Tensor, own_NKGk: Tensor, lognorms_NKG: Tensor) -> None:
    """Scores become shares of the softmax, in place."""
    shared_KME.sub_(_by_head(lognorms_NKG)[..., None]).exp_()
    own_NKGk.sub_(lognorms_NKG[..., None]).exp_()
