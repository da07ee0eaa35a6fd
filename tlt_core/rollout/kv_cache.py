"""Slot KV cache: one row of keys and values per live request, live rows first.

The live requests always occupy slots 0 .. B-1, so a decode step reads the cache through a plain view, without
gathering.  When a request ends, the last live row moves into its slot (`move`).  Decode attention treats the query
heads that share a key/value head as extra query rows, so grouped-query attention copies nothing either.

A verification pass writes its draft tokens behind the known ones, in tree order, whatever their depth; `keep_path`
then moves the accepted ones to the positions that they turned out to have.  A slot is longer than a request by the
largest draft.

Shapes: Y layers, S slots, B live slots, K key/value heads, G query heads per key/value head, C cache length, d head
size, T tokens in this pass; N draft tokens, W queries of the slot that has most, A tokens of an accepted path.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.kv_commit import kv_commit
from kernels.packed_attention import packed_causal_attention
from kernels.slot_attention import SlotMask, slot_attention
from tlt_core.model.config import DecoderConfig
from tlt_core.model.decoder import Attend
from tlt_core.speculation import DraftTree


class TreeLayout(NamedTuple):
    """Where the B newest tokens and N draft tokens of a verification pass are: in the cache, in time, in attention."""

    rows_T: Tensor  # int64, live slot
    positions_T: Tensor  # int64, position in the sequence, known tokens included
    places_T: Tensor  # int64, position in the cache
    queries_BW: Tensor  # int64, the slot's tokens among the T; filled up with its newest token
    columns_T: Tensor  # int64, where in W a token is
    visible_BWC: Tensor  # bool

    @classmethod
    def of(cls, tree: DraftTree, positions_B: Tensor, *, longest: int) -> "TreeLayout":
        """positions_B: of the newest tokens.  longest: known tokens of the longest row."""
        live, device = len(positions_B), positions_B.device
        counts_B = torch.zeros_like(positions_B).index_add_(0, tree.rows_N, torch.ones_like(tree.rows_N))
        first_B = counts_B.cumsum(0) - counts_B
        own_N = torch.arange(len(tree.rows_N), device=device)
        columns_N = own_N - first_B[tree.rows_N] + 1
        width = int(counts_B.max()) + 1
        queries_BW = torch.arange(live, device=device)[:, None].repeat(1, width)
        queries_BW[tree.rows_N, columns_N] = own_N + live
        # ancestors: a token sees what its parent sees, and itself
        sees_BWW = torch.zeros(live, width, width, dtype=torch.bool, device=device)
        sees_BWW[:, :, 0] = True
        parents_N = torch.where(tree.parents_N < 0, 0, columns_N[tree.parents_N])
        sees_NW = torch.zeros(len(own_N), width, dtype=torch.bool, device=device)
        sees_NW[own_N, columns_N] = True
        sees_BWW[tree.rows_N, columns_N] |= sees_NW
        for _ in range(int(tree.depths_N.max()) - 1):
            sees_BWW[tree.rows_N, columns_N] |= sees_BWW[tree.rows_N, parents_N]
        at_C = torch.arange(longest + width - 1, device=device)
        visible_BWC = (at_C <= positions_B[:, None])[:, None].repeat(1, width, 1)
        offset_BC = at_C - positions_B[:, None]
        drafted_BWC = sees_BWW.gather(2, offset_BC.clamp(0, width - 1)[:, None].expand(-1, width, -1))
        visible_BWC |= drafted_BWC & ((offset_BC > 0) & (offset_BC < width))[:, None]
        return cls(
            rows_T=torch.cat([queries_BW[:, 0], tree.rows_N]),
            positions_T=torch.cat([positions_B, positions_B[tree.rows_N] + tree.depths_N]),
            places_T=torch.cat([positions_B, positions_B[tree.rows_N] + columns_N]),
            queries_BW=queries_BW,
            columns_T=torch.cat([torch.zeros_like(positions_B), columns_N]),
            visible_BWC=visible_BWC,
        )


class SlotCache:
    """Keys and values of up to `num_slots` requests of up to `max_len` tokens."""

    def __init__(
        self,
        config: DecoderConfig,
        *,
        num_slots: int,
        max_len: int,
        dtype: torch.dtype,
        device: torch.device,
        max_draft_tokens: int = 0,
    ) -> None:
        """max_draft_tokens: the largest tree of one request that `verify_attend` will meet."""
        self.max_len = max_len
        shape = (config.num_layers, num_slots, config.num_kv_heads, max_len + max_draft_tokens, config.head_dim)
        self.keys_YSKCd = torch.zeros(shape, dtype=dtype, device=device)
        self.values_YSKCd = torch.zeros(shape, dtype=dtype, device=device)

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one slot over another."""
        for cache in (self.keys_YSKCd, self.values_YSKCd):
            cache[:, target, :, :length] = cache[:, source, :, :length]

    def prefill_attend(self, slots: list[int], offsets_S1: Tensor) -> Attend:
        """Attention for packed prompts that start at position 0: prompt i goes to slot slots[i]."""
        bounds = offsets_S1.tolist()

        def attend(layer: int, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> Tensor:
            for slot, start, end in zip(slots, bounds, bounds[1:], strict=False):
                self.keys_YSKCd[layer, slot, :, : end - start] = k_TKd[start:end].transpose(0, 1)
                self.values_YSKCd[layer, slot, :, : end - start] = v_TKd[start:end].transpose(0, 1)
            return packed_causal_attention(q_THd, k_TKd, v_TKd, offsets_S1)

        return attend

    def decode_attend(self, positions_B: Tensor, longest: int) -> Attend:
        """Attention of one new token per live slot, at `positions_B`; `longest` is their maximum plus one."""
        num_live = len(positions_B)
        slots_B = torch.arange(num_live, device=positions_B.device)
        visible_B1C = (torch.arange(longest, device=positions_B.device) <= positions_B[:, None])[:, None]
        mask: SlotMask | None = None

        def attend(layer: int, q_BHd: Tensor, k_BKd: Tensor, v_BKd: Tensor) -> Tensor:
            nonlocal mask
            keys, values = self.keys_YSKCd[layer], self.values_YSKCd[layer]
            keys[slots_B, :, positions_B] = k_BKd
            values[slots_B, :, positions_B] = v_BKd
            q_BKGd = q_BHd.unflatten(1, (k_BKd.shape[1], -1))
            mask = mask or _slot_mask(visible_B1C, q_BKGd)
            out_BKGd = slot_attention(q_BKGd, keys[:num_live, :, :longest], values[:num_live, :, :longest], mask)
            return out_BKGd.flatten(1, 2)

        return attend

    def verify_attend(self, layout: TreeLayout) -> Attend:
        """Attention of newest and draft tokens, each of which sees its slot's known tokens and its own ancestors."""
        live, width, longest = layout.visible_BWC.shape
        mask: SlotMask | None = None

        def attend(layer: int, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> Tensor:
            nonlocal mask
            keys, values = self.keys_YSKCd[layer], self.values_YSKCd[layer]
            keys[layout.rows_T, :, layout.places_T] = k_TKd
            values[layout.rows_T, :, layout.places_T] = v_TKd
            # W queries of G heads below each other
            q_BWKGd = q_THd[layout.queries_BW].unflatten(2, (k_TKd.shape[1], -1))
            mask = mask or _slot_mask(layout.visible_BWC, q_BWKGd[:, 0])
            q_BKNd = q_BWKGd.transpose(1, 2).flatten(2, 3)
            out_BKNd = slot_attention(q_BKNd, keys[:live, :, :longest], values[:live, :, :longest], mask)
            out_BWHd = out_BKNd.unflatten(2, (width, -1)).transpose(1, 2).flatten(2, 3)
            return out_BWHd[layout.rows_T, layout.columns_T]

        return attend

    def keep_path(self, layout: TreeLayout, nodes_BA: Tensor, counts_B: Tensor) -> None:
        """Move the keys and values of accepted draft tokens to the positions that they have in the sequence.

        nodes_BA: index into the T tokens, of which the first counts_B of a row are its accepted path.
        """
        sources_BA, targets_BA = layout.places_T[nodes_BA], layout.positions_T[nodes_BA]
        accepted_BA = torch.arange(nodes_BA.shape[1], device=counts_B.device) < counts_B[:, None]
        moved_BA = accepted_BA & (sources_BA != targets_BA)
        kv_commit(self.keys_YSKCd, self.values_YSKCd, sources_BA, targets_BA, moved_BA)


def _slot_mask(visible_BWC: Tensor, q_BKGd: Tensor) -> SlotMask:
    _, num_kv, grouped, _ = q_BKGd.shape
    return SlotMask.of(visible_BWC, num_kv=num_kv, grouped=grouped, dtype=q_BKGd.dtype)
