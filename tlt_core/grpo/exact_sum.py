"""Sums of gradients that do not depend on the order: every order gives the same bits.

Math.  Let u = 2^-46 and c = 1.5 * 2^52 u = 96.  Summands x are float32 or bfloat16; from |x| = 2^-23 on they are
multiples of u themselves.  In double precision, (x + c) - c is x then, and for a smaller x the multiple of u nearest to
it: a summand loses at most 2^-47 = 7e-15.  Sums of multiples of u are exact in double precision while they stay below
2^53 u = 128, and exact sums do not depend on the order.  So where every partial sum of an entry stays below 128, its
bits depend neither on the order nor on how the summands are divided among workers.

Beyond 128, which no gradient that can be trained on comes near, a sum is rounded as usual.  Infinity and NaN stay.
"""

import torch
from torch import Tensor

from kernels.dispatch import native_library

_SHIFT = 96.0
_PIECE = 1 << 16  # entries whose double-precision copies stay in a CPU's cache


def add_exactly(total: Tensor, values: Tensor) -> None:
    """Add `values` to the float64 `total` in place, rounded as above.  Same shape; `total` contiguous."""
    assert (total.dtype, total.shape) == (torch.float64, values.shape), "sums and summands fit"
    if total.is_cuda:
        total.add_(values.double().add_(_SHIFT).sub_(_SHIFT))
        return
    library = native_library("auto", total, op="add_exactly")
    if library is not None and values.dtype in (torch.bfloat16, torch.float32):
        summands = values.contiguous()
        half = values.dtype == torch.bfloat16
        library.tlt_add_exactly(total.data_ptr(), summands.data_ptr(), half, summands.numel())
        return
    for sums, summands in zip(total.view(-1).split(_PIECE), values.reshape(-1).split(_PIECE), strict=True):
        sums.add_(summands.double().add_(_SHIFT).sub_(_SHIFT))
