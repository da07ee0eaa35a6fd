"""Causal attention over packed sequences: each token sees the earlier tokens of its own sequence, nothing else.

Math, for token t of a sequence that starts at s:  out_t = sum_{s <= j <= t} softmax_j(q_t . k_j / sqrt(d)) v_j,
query head h reading key/value head h // (H / K).

Shapes: T tokens of all sequences, S sequences, H query heads, K key/value heads, d head size.
"""

import importlib.util
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
    """One scaled-dot-product call per sequence, grouped-query attention without copies of keys and values."""
    lengths = (offsets_S1[1:] - offsets_S1[:-1]).tolist()
    # split, not slices: the backward of each slice would fill a gradient of the whole pack.
    sequences = zip(*(x.transpose(0, 1).split(lengths, dim=1) for x in (q_THd, k_TKd, v_TKd)), strict=True)
    outs = [
        F.scaled_dot_product_attention(q_HLd[None], k_KLd[None], v_KLd[None], is_causal=True, enable_gqa=True)[0]
        for q_HLd, k_KLd, v_KLd in sequences
    ]
    return torch.cat(outs, dim=1).transpose(0, 1)


def _has_flash() -> bool:
    return importlib.util.find_spec("flash_attn") is not None
