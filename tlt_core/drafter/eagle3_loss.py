"""What the drafter is trained on: cross-entropy against the target's distribution on the draft vocabulary.

Let p be the target's distribution over its whole vocabulary, q = softmax(z) the drafter's over the draft vocabulary J.

    loss = -sum_{v in J} p_v log q_v = m lse(z) - sum_{v in J} p_v z_v,   m = sum_{v in J} p_v <= 1
    d loss / d z = m q - p

The mass outside J is left out, not spread over J (p is not renormalised): no draft can be right there, and the best q
is p / m either way, so leaving it out only weighs each position by the chance that a draft can be right at all.

overlap = sum_{v in J} min(p_v, q_v) is the acceptance probability of an optimally coupled first draft, and somewhat
above what drafting with the target's own noise reaches.  It counts the missing mass as the loss that it is.

Shapes: N positions, J draft vocabulary.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor


class DraftLoss(NamedTuple):
    """Sums over positions."""

    loss: Tensor  # scalar float32, differentiable with respect to the logits
    overlap: Tensor  # scalar float32


def draft_loss(logits_NJ: Tensor, probs_NJ: Tensor) -> DraftLoss:
    """See the module docstring.  logits: any float dtype; probs: p on the draft vocabulary, any float dtype.

    Keeps one tensor of the logits' size and dtype for backward.
    """
    loss, overlap = _DraftLoss.apply(logits_NJ, probs_NJ)
    return DraftLoss(loss, overlap)


class _DraftLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NJ: Tensor, probs_NJ: Tensor) -> tuple[Tensor, Tensor]:
        p, z = probs_NJ.float(), logits_NJ.float()
        mass_N1 = p.sum(-1, keepdim=True)
        loss = (mass_N1[:, 0] * z.logsumexp(-1)).sum() - (p * z).sum()
        q = z.softmax(-1)
        overlap = torch.minimum(p, q).sum()
        ctx.save_for_backward(q.mul_(mass_N1).sub_(p).to(logits_NJ.dtype))
        ctx.mark_non_differentiable(overlap)
        return loss, overlap

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad_NJ,) = ctx.saved_tensors
        return grad_NJ * grads[0].to(grad_NJ.dtype), None
