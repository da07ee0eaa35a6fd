"""Losses of the drafter against the target's distribution on the draft vocabulary.

Let p be the target's distribution over its whole vocabulary, q = softmax(z) the drafter's over the draft vocabulary J,
and a = sum_{v in J} min(p_v, q_v) the overlap.  Losses of one position, and their gradients with respect to z:

    soft_ce   -sum_{v in J} p_v log q_v = m lse(z) - sum_{v in J} p_v z_v       m q - p,  m = sum_{v in J} p_v <= 1
    tv        1 - a                                 q (b - sum_u b_u q_u),  b_v = -1 where q_v < p_v and 0 elsewhere

p is not renormalised over J.  That would not change the best q of soft_ce, which is p / m; but so each position is
weighted by m, the chance that a draft can be right at all.

a is the acceptance probability of an optimally coupled first draft.  Drafting with the target's own noise reaches at
least (1 - tv) / (1 + tv) (Daliri, Musco, Suresh, arXiv 2408.07978).  So tv is the figure that matters, but its gradient
vanishes where q gives no probability to what p expects.

Shapes: N positions, J draft vocabulary.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.loss.distill_loss import LossKind as LossKind
from kernels.loss.distill_loss import distill_loss, runs_native


class DraftLoss(NamedTuple):
    """Sums over positions."""

    loss: Tensor  # scalar, at least float32, differentiable with respect to the logits
    overlap: Tensor  # likewise, of no gradient


def draft_loss(logits_NJ: Tensor, probs_NJ: Tensor, *, kind: LossKind = "soft_ce") -> DraftLoss:
    """See the module docstring.  logits: any float dtype; probs: p on the draft vocabulary, any float dtype.

    Keeps one tensor of the logits' size and dtype for backward.
    """
    if runs_native(logits_NJ) or (logits_NJ.is_cuda and logits_NJ.dtype != torch.float64):  # kernels of float32
        return DraftLoss(*distill_loss(logits_NJ, probs_NJ, kind=kind))
    loss, overlap = _DraftLoss.apply(logits_NJ, probs_NJ, kind)
    return DraftLoss(loss, overlap)


class _DraftLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NJ: Tensor, probs_NJ: Tensor, kind: LossKind) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(logits_NJ.dtype, torch.float32)
        p, z = probs_NJ.to(wide), logits_NJ.to(wide)
        q = z.softmax(-1)
        overlap_N = torch.minimum(p, q).sum(-1)
        if kind == "tv":
            loss_N, grad_NJ = 1 - overlap_N, _tv_gradient(p, q)
        else:
            mass_N1 = p.sum(-1, keepdim=True)
            loss_N = mass_N1[:, 0] * z.logsumexp(-1) - (p * z).sum(-1)
            grad_NJ = q.mul_(mass_N1).sub_(p)
        ctx.save_for_backward(grad_NJ.to(logits_NJ.dtype))
        overlap = overlap_N.sum()
        ctx.mark_non_differentiable(overlap)
        return loss_N.sum(), overlap

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad_NJ,) = ctx.saved_tensors
        return grad_NJ * grads[0].to(grad_NJ.dtype), None, None


def _tv_gradient(p_NJ: Tensor, q_NJ: Tensor) -> Tensor:
    below_NJ = torch.where(q_NJ < p_NJ, -q_NJ, 0)  # q b
    return below_NJ - q_NJ * below_NJ.sum(-1, keepdim=True)
