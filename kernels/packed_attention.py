"""Causal attention over packed sequences: each token sees the earlier tokens of its own sequence, nothing else.

Math, for token t of a sequence that starts at s:  out_t = sum_{s <= j <= t} softmax_j(q_t . k_j / sqrt(d)) v_j,
query head h reading key/value head h // (H / K).

Shapes: T tokens of all sequences, S sequences, H query heads, K key/value heads, d head size.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Impl = Literal["auto", "sdpa", "flash"]


def packed_causal_attention(
    q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, offsets_S1: Tensor, *, impl: Impl = "auto"
) -> Tensor:
    """Differentiable; returns [T, H, d].  offsets_S1: start of each sequence and T at the end.

    `flash` needs CUDA and the flash-attn package, and raises ImportError without; `auto` takes it where both exist.
    """
    if impl == "flash" or (impl == "auto" and q_THd.is_cuda and _has_flash()):
        from flash_attn import flash_attn_varlen_func

        offsets = offsets_S1.to(q_THd.device, torch.int32)
        longest = int((offsets_S1[1:] - offsets_S1[:-1]).max())
        return flash_attn_varlen_func(q_THd, k_TKd, v_TKd, offsets, offsets, longest, longest, causal=True)
    return packed_causal_attention_reference(q_THd, k_TKd, v_TKd, offsets_S1)


def packed_causal_attention_reference(q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, offsets_S1: Tensor) -> Tensor:
    """One scaled-dot-product call per sequence.  Key/value heads are repeated: a small copy at training lengths."""
    group = q_THd.shape[1] // k_TKd.shape[1]
    q_HTd, k_HTd, v_HTd = (
        x.transpose(0, 1) for x in (q_THd, k_TKd.repeat_interleave(group, 1), v_TKd.repeat_interleave(group, 1))
    )
    bounds = offsets_S1.tolist()
    outs = [
        F.scaled_dot_product_attention(q_HTd[None, :, a:b], k_HTd[None, :, a:b], v_HTd[None, :, a:b], is_causal=True)[0]
        for a, b in zip(bounds, bounds[1:], strict=False)
    ]
    return torch.cat(outs, dim=1).transpose(0, 1)


def _has_flash() -> bool:
    import importlib.util

    return importlib.util.find_spec("flash_attn") is not None
