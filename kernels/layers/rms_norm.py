"""RMS normalisation with a backward that keeps one float per token.

    y = x r w,  r = (mean(x^2) + eps)^-1/2            dx = r (g w - x r mean(g w x r)),  dw = sum over tokens of g x r

On a CPU torch keeps eight bytes per element or more for backward; x, which the residual stream keeps anyway, and r are
enough.  Rounding is torch's: everything in float32, rounded once at the end.

Shapes: T tokens (any leading axes), D normalised size, B tokens of one block.
"""

import ctypes
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.dispatch import training_library

_NATIVE_ROWS = 64  # native/training.c: ROWS
_CACHED_ELEMENTS = 1 << 17  # float32 elements of one block: half a core's second-level cache


def rms_norm(x: Tensor, weight_D: Tensor, *, eps: float) -> Tensor:
    """x / rms(x) * weight over the last axis, in x's dtype.  Training on a CPU uses the backward above, C where it runs
    in bfloat16, everything else torch's own operation."""
    needs_grad = torch.is_grad_enabled() and (x.requires_grad or weight_D.requires_grad)
    library = training_library(x, op="rms_norm") if weight_D.dtype == x.dtype else None
    if x.device.type == "cpu" and needs_grad:
        y_TD: Tensor = _RmsNorm.apply(x.reshape(-1, x.shape[-1]), weight_D, eps, library)
        return y_TD.view(x.shape)
    if library is not None:
        return _native(library, x.contiguous(), weight_D, eps)
    if x.dtype != weight_D.dtype:  # autocast: half-precision x, float32 weights
        return F.rms_norm(x.float(), weight_D.shape, weight_D.float(), eps).to(x.dtype)
    return F.rms_norm(x, weight_D.shape, weight_D, eps)


def _native(library: ctypes.CDLL, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    y = torch.empty_like(x)
    size = x.shape[-1]
    library.tlt_rms_norm(x.data_ptr(), weight_D.data_ptr(), x.numel() // size, size, eps, y.data_ptr())
    return y


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_D: Tensor, eps: float, library: ctypes.CDLL | None) -> Tensor:
        ctx.library, ctx.eps = library, eps
        if library is not None:
            x_TD = x_TD.contiguous()
            ctx.save_for_backward(x_TD, weight_D)
            return _native(library, x_TD, weight_D, eps)
        y_TD = torch.empty_like(x_TD)
        r_T1 = torch.empty(len(x_TD), 1)
        weight = weight_D.float()
        buffer_BD = _buffer(x_TD)
        for rows in _blocks(x_TD):
            x = buffer_BD[: rows.stop - rows.start].copy_(x_TD[rows])
            r = torch.linalg.vecdot(x, x).div_(x.shape[-1]).add_(eps).rsqrt_()
            r_T1[rows, 0] = r
            y_TD[rows] = x.mul_(r[:, None]).mul_(weight)
        ctx.save_for_backward(x_TD, weight_D, r_T1)
        return y_TD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if ctx.library is not None:
            x_TD, weight_D = ctx.saved_tensors
            grad_TD, grad_x_TD = grads[0].contiguous(), torch.empty_like(x_TD)
            parts_PD = torch.empty(-(-len(x_TD) // _NATIVE_ROWS), x_TD.shape[1])
            ctx.library.tlt_rms_norm_gradient(
                x_TD.data_ptr(), weight_D.data_ptr(), grad_TD.data_ptr(), *x_TD.shape, ctx.eps, grad_x_TD.data_ptr(),
                parts_PD.data_ptr(),
            )  # fmt: skip
            return grad_x_TD, parts_PD.sum(0).to(weight_D.dtype), None, None
        x_TD, weight_D, r_T1 = ctx.saved_tensors
        grad_x_TD = torch.empty_like(x_TD)
        grad_weight_D = torch.zeros_like(weight_D, dtype=torch.float32)
        weight = weight_D.float()
        x_buffer_BD, g_buffer_BD, work_BD = (_buffer(x_TD) for _ in range(3))
        for rows in _blocks(x_TD):
            count = rows.stop - rows.start
            normed = x_buffer_BD[:count].copy_(x_TD[rows]).mul_(r_T1[rows])
            g = g_buffer_BD[:count].copy_(grads[0][rows])
            grad_weight_D += torch.mul(g, normed, out=work_BD[:count]).sum(0)
            g.mul_(weight)
            shared = torch.linalg.vecdot(g, normed).div_(-x_TD.shape[-1])
            grad_x_TD[rows] = g.addcmul_(normed, shared[:, None]).mul_(r_T1[rows])
        return grad_x_TD, grad_weight_D.to(weight_D.dtype), None, None


def _buffer(x_TD: Tensor) -> Tensor:
    size = max(1, min(len(x_TD), _CACHED_ELEMENTS // x_TD.shape[-1]))
    return torch.empty(size, x_TD.shape[-1])


def _blocks(x_TD: Tensor) -> Iterator[slice]:
    size = max(1, _CACHED_ELEMENTS // x_TD.shape[-1])
    for start in range(0, len(x_TD), size):
        yield slice(start, min(start + size, len(x_TD)))
