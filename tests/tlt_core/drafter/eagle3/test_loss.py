"""The loss against numbers by hand and against autograd."""

import pytest
import torch

from tlt_core.drafter.eagle3.loss import draft_loss


def test_loss_by_hand():
    """p = (0.5, 0.25) with 0.25 outside; q = (0.8, 0.2): loss = -0.5 ln 0.8 - 0.25 ln 0.2, overlap = 0.5 + 0.2."""
    logits = torch.tensor([[0.8, 0.2], [0.8, 0.2]]).log().add(3.0).double().requires_grad_()
    probs = torch.tensor([[0.5, 0.25], [0.5, 0.25]])
    result = draft_loss(logits, probs)
    assert result.loss.item() == pytest.approx(2 * (0.5 * 0.22314 + 0.25 * 1.60944), abs=1e-4)
    assert float(result.overlap) == pytest.approx(1.4, abs=1e-5)
    (3 * result.loss).backward()
    expected = 3 * (0.75 * torch.tensor([0.8, 0.2]) - torch.tensor([0.5, 0.25]))
    torch.testing.assert_close(logits.grad, expected.double().expand(2, 2), atol=1e-5, rtol=0)


def test_loss_gradient_is_autograds():
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(5, 33, generator=generator) * 20).requires_grad_()  # saturated
    probs = torch.rand(5, 33, generator=generator) / 30
    draft_loss(logits, probs).loss.backward()
    (expected,) = torch.autograd.grad(-(probs * logits.log_softmax(-1)).sum(), logits)
    torch.testing.assert_close(logits.grad, expected, atol=1e-6, rtol=1e-4)


def test_total_variation_by_hand():
    """q = (0.8, 0.2) against p = (0.5, 0.3), 0.2 outside: 1 - (0.5 + 0.2).  Token 1 alone is below p: b = (0, -1),
    sum b q = -0.2, so dz = q (b + 0.2) = (0.16, -0.16)."""
    logits = torch.tensor([[0.8, 0.2]]).log().add(1.0).double().requires_grad_()
    result = draft_loss(logits, torch.tensor([[0.5, 0.3]]).double(), kind="tv")
    assert result.loss.item() == pytest.approx(0.3)
    result.loss.backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[0.16, -0.16]]).double(), atol=1e-7, rtol=0)


@pytest.mark.parametrize("kind", ["soft_ce", "tv"])
def test_gradients_numerically(kind):
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(5, 33, generator=generator, dtype=torch.float64) * 3).requires_grad_()
    probs = torch.randn(5, 40, generator=generator, dtype=torch.float64).mul(3).softmax(-1)[:, :33]  # mass is missing
    assert torch.autograd.gradcheck(lambda z: draft_loss(z, probs, kind=kind).loss, (logits,), eps=1e-7, atol=1e-5)
