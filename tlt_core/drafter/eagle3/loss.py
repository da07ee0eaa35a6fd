"""Losses of the drafter: against the target's distribution on the draft vocabulary; for some methods also features.

Let p be the target's distribution over its whole vocabulary, q = softmax(z) the drafter's over the draft vocabulary J,
and a = sum_{v in J} min(p_v, q_v) the overlap.  Losses of one position, and their gradients with respect to z:

    soft_ce   -sum_{v in J} p_v log q_v = m lse(z) - sum_{v in J} p_v z_v       m q - p,  m = sum_{v in J} p_v <= 1
    tv        1 - a                                 q (b - sum_u b_u q_u),  b_v = -1 where q_v < p_v and 0 elsewhere
    mixed     (1 - a) soft_ce + a tv, with a in the weights held fixed

p is not renormalised over J.  That would not change the best q of soft_ce, which is p / m; but so each position is
weighted by m, the chance that a draft can be right at all.

a is the acceptance probability of an optimally coupled first draft.  Drafting with the target's own noise reaches at
least (1 - tv) / (1 + tv) (Daliri, Musco, Suresh, arXiv 2408.07978).  So tv is the figure that matters, but its gradient
vanishes where q gives no probability to what p expects.  `mixed` learns such positions by soft_ce, and by tv where the
two agree.  LK losses (arXiv 2602.23881) mix the two by a falling weight; the weight 1 - a of each position is ours.

Feature regression (EAGLE, arXiv 2401.15077), of the methods `hass` and `eagle`: let y_t be the drafter's output at
position t, and g_t its input there, the fused hidden states of the target (`model`).  While drafting, y_t stands in for
g_{t+1}, which is not there yet.  So smooth L1 draws y_t to g_{t+1}, with no gradient into g.

Shapes: N positions, J draft vocabulary, D hidden size.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.loss.distill_loss import LossKind as LossKind
from kernels.loss.distill_loss import distill_loss, runs_native


class DraftLoss(NamedTuple):
    """Sums over positions."""

    loss: Tensor  # scalar, at least float32, differentiable with respect to the logits
    overlap: Tensor  # likewise, of no gradient


def draft_loss(
    logits_NJ: Tensor, probs_NJ: Tensor, *, kind: LossKind = "soft_ce", top: int = 0, top_weight: float = 0.0
) -> DraftLoss:
    """See the module docstring.  logits: any float dtype; probs: p on the draft vocabulary, any float dtype.

    top, top_weight: add top_weight times the terms of soft_ce that belong to the `top` likeliest tokens of p (HASS,
    arXiv 2408.15766).  Keeps one tensor of the logits' size and dtype for backward.
    """
    if runs_native(logits_NJ) or (logits_NJ.is_cuda and logits_NJ.dtype != torch.float64):  # kernels of float32
        weights_NJ = _with_top(probs_NJ, top, top_weight) if top else None
        return DraftLoss(*distill_loss(logits_NJ, probs_NJ, kind=kind, weights_NJ=weights_NJ))
    loss, overlap = _DraftLoss.apply(logits_NJ, probs_NJ, kind, top, top_weight)
    return DraftLoss(loss, overlap)


def feature_loss(y_ND: Tensor, next_fused_ND: Tensor) -> Tensor:
    """Smooth L1, mean over features, summed over positions; scalar float32."""
    return F.smooth_l1_loss(y_ND.float(), next_fused_ND.detach().float(), reduction="sum") / y_ND.shape[1]


class _DraftLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_NJ: Tensor, probs_NJ: Tensor, kind: LossKind, top: int, top_weight: float
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(logits_NJ.dtype, torch.float32)
        p, z = probs_NJ.to(wide), logits_NJ.to(wide)
        q = z.softmax(-1)
        overlap_N = torch.minimum(p, q).sum(-1)
        if kind == "tv":
            loss_N, grad_NJ = 1 - overlap_N, _tv_gradient(p, q)
        else:
            weighed = p if not top else _with_top(p, top, top_weight)
            mass_N1 = weighed.sum(-1, keepdim=True)
            loss_N = mass_N1[:, 0] * z.logsumexp(-1) - (weighed * z).sum(-1)
            tv_grad_NJ = _tv_gradient(p, q) if kind == "mixed" else None
            grad_NJ = q.mul_(mass_N1).sub_(weighed)
            if tv_grad_NJ is not None:
                loss_N = torch.lerp(loss_N, 1 - overlap_N, overlap_N)
                grad_NJ.lerp_(tv_grad_NJ, overlap_N[:, None])
        ctx.save_for_backward(grad_NJ.to(logits_NJ.dtype))
        overlap = overlap_N.sum()
        ctx.mark_non_differentiable(overlap)
        return loss_N.sum(), overlap

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        (grad_NJ,) = ctx.saved_tensors
        return grad_NJ * grads[0].to(grad_NJ.dtype), None, None, None, None


def _tv_gradient(p_NJ: Tensor, q_NJ: Tensor) -> Tensor:
    below_NJ = torch.where(q_NJ < p_NJ, -q_NJ, 0)  # q b
    return below_NJ - q_NJ * below_NJ.sum(-1, keepdim=True)


def _with_top(p_NJ: Tensor, top: int, weight: float) -> Tensor:
    best = p_NJ.topk(min(top, p_NJ.shape[1]), dim=-1)
    return p_NJ.scatter(-1, best.indices, best.values * (1 + weight))
