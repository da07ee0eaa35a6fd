"""Slot KV cache: one row of keys and values per live request, live rows first.

The live requests always occupy slots 0 .. B-1, so a decode step reads the cache through a plain view.  Query heads that
share a key/value head are extra query rows, so grouped-query attention copies nothing either.

A verification pass writes its draft tokens behind the known ones, in tree order.  `keep_path` then moves the accepted
ones to their positions in the sequence.  A slot is longer than a request by the largest draft.

Shapes: Y layers, S slots, B live slots, K key/value heads, G query heads per key/value head, C cache length, d head
size, T tokens in this pass; N draft tokens, W queries of the slot that has most, A tokens of an accepted path.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernels.attention.kv_commit import kv_commit
from kernels.attention.packed_attention import packed_causal_attention
from kernels.attention.slot_attention import SlotMask, slot_attention
from kernels.sampling.spec_verify import AcceptedPath
from kernels.tree.tree_layout import TreeLayout, prompt_layout
from tlt_core.model.config import DecoderConfig
from tlt_core.model.decoder import Attend, PlacedAttend


class _Sight(NamedTuple):
    """The tokens of a verification pass by slot, W queries each."""

    queries_BW: Tensor  # int64, the slot's tokens among the T; padded with its newest token
    columns_T: Tensor  # int64, where in W a token is
    visible_BWC: Tensor  # bool

    @classmethod
    def of(cls, layout: TreeLayout, live: int) -> "_Sight":
        columns_T = layout.places_T - layout.known_T + 1
        width = int(columns_T.max()) + 1
        queries_BW = torch.arange(live, device=columns_T.device)[:, None].repeat(1, width)
        queries_BW[layout.rows_T, columns_T] = torch.arange(len(columns_T), device=columns_T.device)
        at_C = torch.arange(int(layout.places_T.max()) + 1, device=columns_T.device)
        visible_TC = (at_C < layout.known_T[:, None]).scatter_(1, layout.paths_TA, True)
        return cls(queries_BW, columns_T, visible_TC[queries_BW])


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
        self._shape, self._dtype, self._device = shape, dtype, device
        self.acquire()

    def acquire(self) -> None:
        """Take the memory, all zeros."""
        self.keys_YSKCd = torch.zeros(self._shape, dtype=self._dtype, device=self._device)
        self.values_YSKCd = torch.zeros(self._shape, dtype=self._dtype, device=self._device)

    def release(self) -> None:
        """Give it back, and with it the keys and values of all requests."""
        self.keys_YSKCd = self.values_YSKCd = torch.empty(0, dtype=self._dtype, device=self._device)

    @property
    def num_bytes(self) -> int:
        return self.keys_YSKCd.nbytes + self.values_YSKCd.nbytes

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one slot over another."""
        for cache in (self.keys_YSKCd, self.values_YSKCd):
            cache[:, target, :, :length] = cache[:, source, :, :length]

    def prefill_attend(self, slots: list[int], offsets_S1: Tensor, starts: list[int]) -> PlacedAttend:
        """Attention for packed parts of prompts: part i goes to slot slots[i], whose first starts[i] positions are
        known.  offsets_S1: on the CPU, so that nobody waits for them."""
        bounds = offsets_S1.tolist()
        parts = list(zip(slots, starts, bounds, bounds[1:], strict=False))

        def attend(layer: int, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> Tensor:
            keys, values = self.keys_YSKCd[layer], self.values_YSKCd[layer]
            for slot, start, begin, end in parts:
                keys[slot, :, start : start + end - begin] = k_TKd[begin:end].transpose(0, 1)
                values[slot, :, start : start + end - begin] = v_TKd[begin:end].transpose(0, 1)
            if not any(starts):
                return packed_causal_attention(q_THd, k_TKd, v_TKd, offsets_S1)
            outputs = []
            for slot, start, begin, end in parts:
                length = start + end - begin
                seen = torch.arange(length) <= torch.arange(start, length)[:, None]
                out_HTd = scaled_dot_product_attention(
                    q_THd[begin:end].transpose(0, 1),
                    keys[slot, :, :length],
                    values[slot, :, :length],
                    attn_mask=seen,
                    enable_gqa=True,
                )
                outputs.append(out_HTd.transpose(0, 1))
            return torch.cat(outputs)

        counts_S = offsets_S1.diff()
        rows_T = torch.tensor(slots).repeat_interleave(counts_S)
        places_T = torch.cat([torch.arange(end - begin) + start for _, start, begin, end in parts])
        return self._placed(attend, prompt_layout(rows_T, places_T))

    def decode_attend(self, positions_B: Tensor, longest: int) -> PlacedAttend:
        """Attention of one new token per live slot, at `positions_B`; `longest` is their maximum plus one."""
        num_live = len(positions_B)
        slots_B = torch.arange(num_live, device=positions_B.device)
        mask: SlotMask | None = None

        def attend(layer: int, q_BHd: Tensor, k_BKd: Tensor, v_BKd: Tensor) -> Tensor:
            nonlocal mask
            keys, values = self.keys_YSKCd[layer], self.values_YSKCd[layer]
            keys[slots_B, :, positions_B] = k_BKd
            values[slots_B, :, positions_B] = v_BKd
            q_BKGd = q_BHd.unflatten(1, (k_BKd.shape[1], -1))
            if mask is None:
                at_C = torch.arange(longest, device=positions_B.device)
                mask = _slot_mask((at_C <= positions_B[:, None])[:, None], q_BKGd)
            out_BKGd = slot_attention(q_BKGd, keys[:num_live, :, :longest], values[:num_live, :, :longest], mask)
            return out_BKGd.flatten(1, 2)

        no_path_BA, no_length_B = slots_B.new_empty(num_live, 0), torch.zeros_like(slots_B)
        layout = TreeLayout(slots_B, positions_B, positions_B, positions_B + 1, no_path_BA, no_length_B)
        return self._placed(attend, layout)

    def verify_attend(self, layout: TreeLayout, live: int) -> PlacedAttend:
        """Attention of newest and draft tokens, each of which sees its slot's known tokens and its own ancestors."""
        sight: _Sight | None = None
        mask: SlotMask | None = None

        def attend(layer: int, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> Tensor:
            nonlocal mask, sight
            sight = sight or _Sight.of(layout, live)
            _, width, longest = sight.visible_BWC.shape
            keys, values = self.keys_YSKCd[layer], self.values_YSKCd[layer]
            keys[layout.rows_T, :, layout.places_T] = k_TKd
            values[layout.rows_T, :, layout.places_T] = v_TKd
            # the W queries of each of G heads become W G query rows
            q_BWKGd = q_THd[sight.queries_BW].unflatten(2, (k_TKd.shape[1], -1))
            mask = mask or _slot_mask(sight.visible_BWC, q_BWKGd[:, 0])
            q_BKNd = q_BWKGd.transpose(1, 2).flatten(2, 3)
            out_BKNd = slot_attention(q_BKNd, keys[:live, :, :longest], values[:live, :, :longest], mask)
            out_BWHd = out_BKNd.unflatten(2, (width, -1)).transpose(1, 2).flatten(2, 3)
            return out_BWHd[layout.rows_T, sight.columns_T]

        return self._placed(attend, layout)

    def _placed(self, attend: Attend, layout: TreeLayout) -> PlacedAttend:
        return PlacedAttend(attend, layout, self.keys_YSKCd, self.values_YSKCd)

    def keep_path(self, places_T: Tensor, positions_T: Tensor, path: AcceptedPath, *, fixed: bool) -> None:
        """Move the keys and values of accepted draft tokens to the positions that they have in the sequence.

        fixed: move all A nodes of every row, whatever their values, so that a graph can hold the operation.
        """
        if path.nodes_BA.shape[1] == 1:
            return  # newest tokens lie at their positions
        sources_BA, targets_BA = places_T[path.nodes_BA], positions_T[path.nodes_BA]
        moved_BA: Tensor | None = None
        if not fixed:
            accepted_BA = torch.arange(path.nodes_BA.shape[1], device=places_T.device) < path.counts_B[:, None]
            moved_BA = accepted_BA & (sources_BA != targets_BA)
        kv_commit(self.keys_YSKCd, self.values_YSKCd, sources_BA, targets_BA, moved_BA)


def _slot_mask(visible_BWC: Tensor, q_BKGd: Tensor) -> SlotMask:
    _, num_kv, grouped, _ = q_BKGd.shape
    return SlotMask.of(visible_BWC, num_kv=num_kv, grouped=grouped, dtype=q_BKGd.dtype)
