"""Rotary embedding in the half-split layout of Hugging Face checkpoints.

    (a, b) -> (a cos - b sin, b cos + a sin) for the two halves a, b of a head: x cos + (b, a) (-sin, sin)

The gradient is the rotation by the opposite angle.  C does both in one pass (`native/training.c`), in float32 and
rounded once, as decoding does.

Shapes: T tokens, H heads of any kind, d head size.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor

from kernels.dispatch import training_library

_WIDTH = 32  # C takes halves of whole vectors


def rotate(x_THd: Tensor, cos_T1d: Tensor, signed_sin_T1d: Tensor) -> Tensor:
    """x rotated by each token's angles; signed_sin: the first half negated."""
    library = training_library(x_THd, op="rotate")
    if library is None or cos_T1d.dtype != x_THd.dtype or x_THd.shape[-1] % _WIDTH or len(cos_T1d) != len(x_THd):
        return torch.addcmul(x_THd * cos_T1d, x_THd.roll(x_THd.shape[-1] // 2, -1), signed_sin_T1d)
    y_THd: Tensor = _Rotate.apply(x_THd, cos_T1d.contiguous(), signed_sin_T1d.contiguous(), library)
    return y_THd


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_THd: Tensor, cos_T1d: Tensor, signed_sin_T1d: Tensor, library: ctypes.CDLL) -> Tensor:
        ctx.save_for_backward(cos_T1d, signed_sin_T1d)
        ctx.library = library
        return _rotated(library, x_THd, cos_T1d, signed_sin_T1d, backwards=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _rotated(ctx.library, grads[0], *ctx.saved_tensors, backwards=True), None, None, None


def _rotated(library: ctypes.CDLL, x_THd: Tensor, cos: Tensor, signed_sin: Tensor, *, backwards: bool) -> Tensor:
    if x_THd.stride()[1:] != (x_THd.shape[2], 1):
        x_THd = x_THd.contiguous()
    y_THd = torch.empty(x_THd.shape, dtype=x_THd.dtype)
    tokens, heads, size = x_THd.shape
    library.tlt_rotate(
        x_THd.data_ptr(), tokens, x_THd.stride(0), heads, size, cos.data_ptr(), signed_sin.data_ptr(), backwards,
        y_THd.data_ptr(),
    )  # fmt: skip
    return y_THd
