"""Attention of a few queries of each live request over its own row of a KV cache: decoding, verification, drafting.

Math.  Query n of request b sees the keys c with visible_bwc (w its token; the G query heads of a key/value head are
stacked as query rows):   out_n = sum_c p_nc v_c,   p_n = softmax_c(q_n . k_c / sqrt(d) + m_nc),  m = 0 or -inf.

This op serves rounds whose shapes are those of the live rows: on a CPU.  Rounds of fixed shape, on a GPU, use
`kernels/tree/tree_attention`.

On CPUs with bfloat16 instructions it is faster to copy the parts in use together and to run two batched products over
them than to call torch's attention kernel, as long as there is enough to do.  Scores are then rounded to bfloat16
before the softmax, as in `packed_attention`.

Shapes: B requests, W tokens of the request that has most, K key/value heads, G query heads on each, N = W G query
rows, C cache positions in use, d head size.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_WORTH_COPYING = 1000  # requests * tokens * positions: below, torch's kernel is quicker than the copies


class SlotMask(NamedTuple):
    """What each query row sees, in the form that the chosen implementation wants; made once for all layers."""

    visible_B1NC: Tensor  # bool
    bias_MNC: Tensor | None  # 0 or -inf, M = B K; None: torch's kernel is used

    @classmethod
    def of(cls, visible_BWC: Tensor, *, num_kv: int, grouped: int, dtype: torch.dtype) -> SlotMask:
        """visible_BWC: bool, at least one key of each token.  grouped: G.  dtype: of queries and cache."""
        visible_B1NC = visible_BWC.repeat_interleave(grouped, dim=1)[:, None] if grouped > 1 else visible_BWC[:, None]
        if not _copies(visible_BWC.device.type, dtype) or visible_BWC.numel() < _WORTH_COPYING:
            return cls(visible_B1NC, None)
        zero = torch.zeros((), dtype=dtype)
        bias_B1NC = torch.where(visible_B1NC, zero, zero - torch.inf)
        return cls(visible_B1NC, bias_B1NC.expand(-1, num_kv, -1, -1).flatten(0, 1))


def slot_attention(q_BKNd: Tensor, keys_BKCd: Tensor, values_BKCd: Tensor, mask: SlotMask) -> Tensor:
    """Returns [B, K, N, d].  Keys and values: views of a cache, any strides.  For inference: no gradient is tested."""
    if mask.bias_MNC is None:
        return slot_attention_reference(q_BKNd, keys_BKCd, values_BKCd, mask)
    keys_MCd, values_MCd = (x.flatten(0, 1).contiguous() for x in (keys_BKCd, values_BKCd))
    scores_MNC = torch.baddbmm(mask.bias_MNC, q_BKNd.flatten(0, 1), keys_MCd.mT, alpha=q_BKNd.shape[-1] ** -0.5)
    return torch.bmm(scores_MNC.softmax(-1), values_MCd).view(q_BKNd.shape)


def slot_attention_reference(q_BKNd: Tensor, keys_BKCd: Tensor, values_BKCd: Tensor, mask: SlotMask) -> Tensor:
    return F.scaled_dot_product_attention(q_BKNd, keys_BKCd, values_BKCd, attn_mask=mask.visible_B1NC)


@functools.cache
def _copies(device_type: str, dtype: torch.dtype) -> bool:
    return device_type == "cpu" and dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
