"""Slot KV cache: one row of keys and values per live request, live rows first.

The live requests always occupy slots 0 .. B-1, so a decode step reads the cache through a plain view, without
gathering.  When a request ends, the last live row moves into its slot (`move`).  Decode attention treats the query
heads that share a key/value head as extra query rows, so grouped-query attention copies nothing either.

Shapes: Y layers, S slots, B live slots, K key/value heads, G query heads per key/value head, C cache length, d head
size, T tokens in this pass.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.packed_attention import packed_causal_attention
from tlt_core.model.config import DecoderConfig
from tlt_core.model.decoder import Attend


class SlotCache:
    """Keys and values of up to `num_slots` requests of up to `max_len` tokens."""

    def __init__(
        self, config: DecoderConfig, *, num_slots: int, max_len: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.max_len = max_len
        shape = (config.num_layers, num_slots, config.num_kv_heads, max_len, config.head_dim)
        # Memory is touched, and so taken, only as far as requests really grow.
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
        visible_B11C = (torch.arange(longest, device=positions_B.device) <= positions_B[:, None])[:, None, None]

        def attend(layer: int, q_BHd: Tensor, k_BKd: Tensor, v_BKd: Tensor) -> Tensor:
            keys, values = self.keys_YSKCd[layer], self.values_YSKCd[layer]
            keys[slots_B, :, positions_B] = k_BKd
            values[slots_B, :, positions_B] = v_BKd
            num_kv, head_dim = k_BKd.shape[1:]
            out_BKGd = F.scaled_dot_product_attention(
                q_BHd.reshape(num_live, num_kv, -1, head_dim),
                keys[:num_live, :, :longest],
                values[:num_live, :, :longest],
                attn_mask=visible_B11C,
            )
            return out_BKGd.reshape(num_live, -1, head_dim)

        return attend
