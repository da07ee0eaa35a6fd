"""Losses that teach a drafter the target's distribution over the draft vocabulary: value and gradient in one op.

Math.  With p the target's probabilities on the draft vocabulary (their sum may be below 1), q = softmax(z) the
drafter's, a = sum_v min(p_v, q_v) the overlap and m = sum_v p_v, the losses of one position and their gradients with
respect to z are

    soft_ce   m lse(z) - sum_v p_v z_v                                 m q - p
    tv        1 - a                                 q (b - sum_u b_u q_u),  b_v = -1 where q_v < p_v and 0 elsewhere

Reasons: tlt_core/drafter/eagle3/train.  Forward also computes the gradient and keeps it in the logits' dtype,
so backward is one product.  The kernels (Triton, C) read a position's logits three times, for normaliser, sums and
gradient, the last two times from the cache, and keep neither q nor any float32 copy.

Shapes: N positions, J draft vocabulary.
"""

from __future__ import annotations

import ctypes
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from kernels.dispatch import Impl, jit, native_library, tl, uses_triton

LossKind = Literal["soft_ce", "tv"]
_KINDS: tuple[LossKind, ...] = get_args(LossKind)  # in the order of loss.c

_NATIVE_DTYPES = (torch.bfloat16, torch.float32)
_BLOCK = 4096  # logits that a program holds in registers


class DistillLoss(NamedTuple):
    """Sums over positions, scalar float32."""

    loss: Tensor  # differentiable with respect to the logits
    overlap: Tensor  # carries no gradient


def distill_loss(
    logits_NJ: Tensor, probs_NJ: Tensor, *, kind: LossKind = "soft_ce", impl: Impl = "auto"
) -> DistillLoss:
    """See the module docstring.  Any float dtype, computed in float32.

    A NaN in the logits makes the loss NaN.  Raises ValueError where the chosen implementation cannot run.
    """
    if impl == "native" or (impl == "auto" and runs_native(logits_NJ)):
        library = native_library("native", logits_NJ, op="distill_loss")
        assert library is not None, "native_library raises when it is missing"
        return DistillLoss(*_Fused.apply(logits_NJ, probs_NJ, kind, library))
    if uses_triton(impl, logits_NJ, op="distill_loss"):
        return DistillLoss(*_Fused.apply(logits_NJ, probs_NJ, kind, None))
    return distill_loss_reference(logits_NJ, probs_NJ, kind=kind)


def runs_native(logits_NJ: Tensor) -> bool:
    """Whether the C kernel takes such logits."""
    return logits_NJ.dtype in _NATIVE_DTYPES and native_library("auto", logits_NJ, op="distill_loss") is not None


def distill_loss_reference(logits_NJ: Tensor, probs_NJ: Tensor, *, kind: LossKind) -> DistillLoss:
    """The specification: the formulas of the losses, differentiated by torch."""
    p, logq = probs_NJ.float(), logits_NJ.float().log_softmax(-1)
    overlap_N = torch.minimum(p, logq.exp()).sum(-1)
    loss_N = 1 - overlap_N if kind == "tv" else -(p * logq).sum(-1)
    return DistillLoss(loss_N.sum(), overlap_N.detach().sum())


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_NJ: Tensor, probs_NJ: Tensor, kind: LossKind, library: ctypes.CDLL | None
    ) -> tuple[Tensor, Tensor]:
        logits_NJ, probs_NJ = logits_NJ.contiguous(), probs_NJ.contiguous()
        loss_N, overlap_N = torch.empty(2, len(logits_NJ), dtype=torch.float32, device=logits_NJ.device)
        grad_NJ = torch.empty_like(logits_NJ)
        if library is not None:
            probs_NJ = probs_NJ.float()
            library.tlt_distill_loss(
                logits_NJ.data_ptr(), logits_NJ.dtype == torch.bfloat16, probs_NJ.data_ptr(), *logits_NJ.shape,
                _KINDS.index(kind), loss_N.data_ptr(), overlap_N.data_ptr(), grad_NJ.data_ptr(),
            )  # fmt: skip
        elif len(logits_NJ):
            _loss_and_gradient[(len(logits_NJ),)](
                logits_NJ, probs_NJ, loss_N, overlap_N, grad_NJ, logits_NJ.shape[1], KIND=kind, BLOCK=_BLOCK
            )
        ctx.save_for_backward(grad_NJ)
        overlap = overlap_N.sum()
        ctx.mark_non_differentiable(overlap)
        return loss_N.sum(), overlap

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        (grad_NJ,) = ctx.saved_tensors
        return grad_NJ * grads[0].to(grad_NJ.dtype), None, None, None


@jit()
def _loss_and_gradient(
    logits, probs, losses, overlaps, grads, size, KIND: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * size
    probs += row * size
    top, total = float("-inf"), 0.0
    for first in range(0, size, BLOCK):
        at = first + tl.arange(0, BLOCK)
        z = tl.load(logits + at, mask=at < size, other=float("-inf")).to(tl.float32)
        new_top = tl.maximum(top, tl.max(z, axis=0))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        total = total * tl.exp(top - shift) + tl.sum(tl.exp(z - shift), axis=0)
        top = new_top
    log_norm = top + tl.log(total)
    overlap, mass, cross, below = 0.0, 0.0, 0.0, 0.0
    for first in range(0, size, BLOCK):
        at = first + tl.arange(0, BLOCK)
        there = at < size
        logq = tl.load(logits + at, mask=there, other=float("-inf")).to(tl.float32) - log_norm
        q, p = tl.exp(logq), tl.load(probs + at, mask=there, other=0.0).to(tl.float32)
        overlap += tl.sum(tl.where(p < q, p, q), axis=0)  # q where it is NaN
        below += tl.sum(tl.where(q < p, q, 0.0), axis=0)
        mass += tl.sum(p, axis=0)
        cross -= tl.sum(tl.where(there, p * logq, 0.0), axis=0)
    tl.store(overlaps + row, overlap)
    tl.store(losses + row, 1.0 - overlap if KIND == "tv" else cross)
    for first in range(0, size, BLOCK):
        at = first + tl.arange(0, BLOCK)
        there = at < size
        q = tl.exp(tl.load(logits + at, mask=there, other=float("-inf")).to(tl.float32) - log_norm)
        p = tl.load(probs + at, mask=there, other=0.0).to(tl.float32)
        grad = q * below - tl.where(q < p, q, 0.0) if KIND == "tv" else mass * q - p
        tl.store(grads + row * size + at, grad.to(grads.dtype.element_ty), mask=there)
