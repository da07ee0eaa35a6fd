"""The drafter with its own outputs as inputs, teacher-forced: the "training-time test" of EAGLE-3 (arXiv 2503.01840).

Depth 1 is the drafter on the target's hidden states.  At depth k + 1, position p takes the drafter's own y of depth k
at p - 1 in the place of the fused hidden state, and sees what it would see when drafting k tokens ahead of position
p - k:

    keys of depth 1 at positions <= p - k;  then of depth j + 1 at position p - k + j, for j = 1 .. k (itself last)

Drafted tokens are the true ones (teacher forcing): along an accepted path this is what drafting computes.

oneDNN builds a kernel for every new shape of a bfloat16 product, so rows are padded to a multiple of `ROW_MULTIPLE`.
Attention has small products: on a CPU it is computed in float32, by kernels that need no building.

Shapes: R rows of the pack, of which C context and T query rows (see `windows`), D hidden size, H query heads,
K key/value heads, G = H / K, d head size, k depths before.
"""

from collections.abc import Iterator
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention.draft_attention import Reach, draft_attention
from kernels.attention.packed_attention import packed_causal_attention
from tlt_core.drafter.eagle3.model import Eagle3Model, rope_table
from tlt_core.drafter.eagle3.windows import Pack

ROW_MULTIPLE = 16


def drafted_depths(model: Eagle3Model, embeds_RD: Tensor, pack: Pack, *, depth: int) -> Iterator[Tensor]:
    """y of depth 1 .. depth at the query rows, [T, D] each.

    Depth k + 1 is meaningful where k rows of the same window come before.  embeds: of `pack.tokens_R`.
    """
    longest = max(window.end for window in pack.windows)
    context, queries = sum(pack.context), sum(pack.queries)
    (context_CD, embeds_TD), (taps_CE, taps_TE), (places_C, places_T) = (
        [pad_rows(part) for part in x.split([context, queries])] for x in (embeds_RD, pack.taps_RE, pack.positions_R)
    )
    fused_CD, hidden_TD = (model.fuse(taps.to(embeds_RD.dtype)) for taps in (taps_CE, taps_TE))
    table = rope_table(model.config, longest, dtype=hidden_TD.dtype, device=hidden_TD.device)  # autocast's dtype
    keys_CKd, values_CKd = model.keys_values(context_CD, fused_CD, table[places_C])
    attend = _DepthAttention(pack, keys_CKd[:context], values_CKd[:context])
    for _ in range(depth):
        y_TD = model(embeds_TD, hidden_TD, table[places_T], attend)[:queries]
        yield y_TD
        hidden_TD = pad_rows(y_TD.roll(1, dims=0))  # across a window's start, into a row that means nothing


def pad_rows(x_N: Tensor) -> Tensor:
    """The same with zero rows behind it, up to a multiple of ROW_MULTIPLE."""
    return F.pad(x_N, (0, 0) * (x_N.ndim - 1) + (0, -len(x_N) % ROW_MULTIPLE))


class _DepthAttention:
    """Attention of one depth after the other."""

    def __init__(self, pack: Pack, context_k_CKd: Tensor, context_v_CKd: Tensor) -> None:
        self._pack, self._context = pack, (context_k_CKd, context_v_CKd)
        # Start of each window's query rows, and of its rows in order, each with the number of all.
        self._offsets_S1 = torch.tensor([0, *accumulate(pack.queries)])
        self._key_offsets_S1 = torch.tensor([0, *accumulate(w.end for w in pack.windows)])
        self._shared: tuple[Tensor, Tensor] | None = None  # of depth 1, [R, K, d], window by window
        self._own: tuple[list[Tensor], list[Tensor]] = [], []  # of each later depth, [T, K, d]

    def __call__(self, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> Tensor:
        rows, dtype = sum(self._pack.queries), q_THd.dtype
        if q_THd.device.type != "cpu":
            return pad_rows(self._attend(q_THd[:rows], k_TKd[:rows], v_TKd[:rows]))
        with torch.autocast("cpu", enabled=False):
            out_THd = self._attend(q_THd[:rows].float(), k_TKd[:rows].float(), v_TKd[:rows].float())
        return pad_rows(out_THd).to(dtype)

    def _attend(self, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> Tensor:
        if self._shared is None:
            keys, values = (x.to(k_TKd.dtype) for x in self._context)
            self._shared = self._pack.in_order(keys, k_TKd), self._pack.in_order(values, v_TKd)
            bounds, key_bounds = self._offsets_S1, self._key_offsets_S1
            return packed_causal_attention(q_THd, *self._shared, bounds, key_offsets_S1=key_bounds)
        self._own[0].append(k_TKd)
        self._own[1].append(v_TKd)
        return self._later(q_THd, self._shared, len(self._own[0]))

    def _later(self, q_THd: Tensor, shared: tuple[Tensor, Tensor], k: int) -> Tensor:
        """Depth k + 1: the keys of depth 1 up to k positions back, then one key of each later depth."""
        num_kv, d = shared[0].shape[1:]
        # Row p reads depth j + 1 at p - (k - j).
        own_TKkd, own_values_TKkd = (
            torch.stack([x.roll(k - j, dims=0) for j, x in enumerate(xs, start=1)], dim=2) for xs in self._own
        )
        q_TKGd = (q_THd * d**-0.5).unflatten(1, (num_kv, -1))
        reaches = [Reach(w.end - w.start, w.end, w.start - k) for w in self._pack.windows]
        return draft_attention(q_TKGd, *shared, own_TKkd, own_values_TKkd, reaches).flatten(1, 2)
