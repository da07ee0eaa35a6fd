"""Keyed Gumbel arg-max: exact sampling whose noise is a pure function of a key and a token id.

Math.  With i.i.d. Gumbel noise g_v, arg-max_v (z_v + g_v) is an exact sample of softmax(z) (Gumbel-max trick).
Here g_v = -log(-log1p(-u_v)), u_v = hash(key, v) in (0, 1): whoever knows the key computes the same noise.  So a
drafter can propose with the target's own noise (Daliri, Musco, Suresh, arXiv 2408.07978), and a response is
repeatable whatever batch, worker or strategy it ran with.

The hash is counter based: two 32-bit key words are injected before and between the two multiplications of the
murmur3 finaliser, whose counter is the token id.  u has 31 bits, mapped to float32 so that the *small* values, which
win, keep full resolution: the noise is exact down to probabilities of about 2^-32.

Shapes: N rows (one sampled position each), V vocabulary.  Only integer and elementwise operations are used, so the
integer stream is the same on every device.
"""

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B1 - (1 << 32)  # as signed 32-bit
_MIX_1 = 0x85EBCA6B - (1 << 32)
_MIX_2 = 0xC2B2AE35 - (1 << 32)
_SCALE = 2.0**-31
_LARGEST_U = 1.0 - 2.0**-24


def gumbel_noise(keys_N2: Tensor, ids_V: Tensor) -> Tensor:
    """Noise of every row for the given token ids.

    keys_N2: [N, 2] int32 row keys.  ids_V: [V] int32 token ids (any subset, any order), or [N, V] a set per row.
    Returns [N, V] float32 Gumbel noise, between -2.9 and 22.2.
    """
    bits = ids_V.mul(_GOLDEN) ^ keys_N2[:, :1]
    shifted = torch.empty_like(bits)  # fresh memory in every line would cost more than the arithmetic
    bits ^= torch.bitwise_right_shift(bits, 16, out=shifted).bitwise_and_(0xFFFF)
    bits *= _MIX_1
    bits ^= keys_N2[:, 1:]
    bits ^= torch.bitwise_right_shift(bits, 13, out=shifted).bitwise_and_(0x7FFFF)
    bits *= _MIX_2
    bits ^= torch.bitwise_right_shift(bits, 16, out=shifted).bitwise_and_(0xFFFF)
    bits &= 0x7FFFFFFF
    u = bits.to(torch.float32).add_(0.5).mul_(_SCALE).clamp_(max=_LARGEST_U)
    return u.neg_().log1p_().neg_().log_().neg_()


def coupled_argmax(scores_NV: Tensor, keys_N2: Tensor, ids_V: Tensor) -> Tensor:
    """arg-max over V of scores + noise: an exact sample of softmax(scores) per row.  Returns [N] int64 columns."""
    return gumbel_noise(keys_N2, ids_V).add_(scores_NV).argmax(dim=-1)
