"""The loss against numbers by hand and against autograd."""

import pytest
import torch

from tlt_core.drafter.eagle3.loss import draft_loss, feature_loss


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


def test_mixed_by_hand():
    """The same position: overlap 0.7, so 0.3 soft CE and 0.7 total variation."""
    logits = torch.tensor([[0.8, 0.2]]).log().double().requires_grad_()
    result = draft_loss(logits, torch.tensor([[0.5, 0.3]]).double(), kind="mixed")
    soft_ce = 0.5 * 0.2231436 + 0.3 * 1.6094379
    assert result.loss.item() == pytest.approx(0.3 * soft_ce + 0.7 * 0.3, abs=1e-6)
    assert float(result.overlap) == pytest.approx(0.7)
    result.loss.backward()
    expected = 0.3 * torch.tensor([[0.8 * 0.8 - 0.5, 0.8 * 0.2 - 0.3]]) + 0.7 * torch.tensor([[0.16, -0.16]])
    torch.testing.assert_close(logits.grad, expected.double(), atol=1e-7, rtol=0)


def random_case(seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(5, 33, generator=generator, dtype=torch.float64) * 3).requires_grad_()
    probs = torch.randn(5, 40, generator=generator, dtype=torch.float64).mul(3).softmax(-1)[:, :33]  # mass is missing
    return logits, probs


@pytest.mark.parametrize(("kind", "top"), [("soft_ce", 0), ("soft_ce", 4), ("soft_ce", 99), ("tv", 0)])
def test_gradients_numerically(kind, top):
    logits, probs = random_case()
    assert torch.autograd.gradcheck(
        lambda z: draft_loss(z, probs, kind=kind, top=top, top_weight=2.5).loss, (logits,), eps=1e-7, atol=1e-5
    )


def test_mixed_gradient_with_its_weights_held():
    logits, probs = random_case()
    draft_loss(logits, probs, kind="mixed").loss.backward()
    q = logits.softmax(-1)
    overlap = torch.minimum(probs, q).sum(-1)
    held = overlap.detach()
    loss = (1 - held) * -(probs * logits.log_softmax(-1)).sum(-1) + held * (1 - overlap)
    (expected,) = torch.autograd.grad(loss.sum(), logits)
    torch.testing.assert_close(logits.grad, expected)


def test_likeliest_tokens_count_again():
    """Two tokens of three, at twice their own weight on top: soft CE of (3 x 0.5, 3 x 0.3, 0.1)."""
    logits = torch.tensor([[0.2, 0.7, 0.1]]).log().requires_grad_()
    found = draft_loss(logits, torch.tensor([[0.5, 0.3, 0.1]]), top=2, top_weight=2.0)
    expected = -(1.5 * torch.tensor(0.2).log() + 0.9 * torch.tensor(0.7).log() + 0.1 * torch.tensor(0.1).log())
    assert found.loss.item() == pytest.approx(float(expected), rel=1e-6)
    assert float(found.overlap) == pytest.approx(0.2 + 0.3 + 0.1)


def test_feature_loss_by_hand():
    """Smooth L1: 0.5 x^2 up to 1, then x - 0.5; the mean over features, summed over positions; the target is fixed."""
    y = torch.tensor([[0.5, 3.0], [0.0, 0.0]]).requires_grad_()
    target = torch.tensor([[0.0, 1.0], [0.0, -1.0]]).requires_grad_()
    loss = feature_loss(y, target)
    assert loss.item() == pytest.approx((0.125 + 1.5 + 0.0 + 0.5) / 2)
    loss.backward()
    torch.testing.assert_close(y.grad, torch.tensor([[0.25, 0.5], [0.0, 0.5]]))
    assert target.grad is None
