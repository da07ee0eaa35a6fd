"""The drafter's loss in Triton and in C against its specification and the trainer's own, in value and gradient.

Tolerances: float32 rounding of sums; in bf16 the gradient is rounded to bf16 (2^-9) once.
"""

import math

import pytest
import torch
from torch import Tensor

from kernels import native
from kernels.loss import distill_loss as module
from kernels.loss.distill_loss import distill_loss

KINDS = ["soft_ce", "tv"]
CASES = {
    "one block": dict(rows=3, size=64, scale=1.0, dtype=torch.float32),
    "odd, several blocks": dict(rows=4, size=2 * 128 + 45, scale=2.0, dtype=torch.float32),
    "saturated": dict(rows=3, size=200, scale=300.0, dtype=torch.float32),
    "bf16": dict(rows=4, size=300, scale=2.0, dtype=torch.bfloat16),
    "one token": dict(rows=2, size=1, scale=1.0, dtype=torch.float32),
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BLOCK", 128)


@pytest.fixture(params=["triton", "native"])
def impl(request: pytest.FixtureRequest, device: str) -> str:
    if request.param == "native" and (device != "cpu" or native.library() is None):
        pytest.skip("the C kernels do not run here")
    return request.param


def inputs(*, rows: int, size: int, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Logits, and a target near them that has a tenth of its mass elsewhere."""
    generator = torch.Generator().manual_seed(size)
    logits = scale * torch.randn(rows, size, generator=generator)
    probs = 0.9 * (logits + torch.randn(rows, size, generator=generator)).softmax(-1)
    return logits.to(dtype), probs


def value_and_gradient(loss, logits: Tensor) -> list[Tensor]:
    leaf = logits.detach().clone().requires_grad_()
    result = loss(leaf)
    (3 * result.loss).backward()
    return [x.detach().float().cpu() for x in (result.loss, result.overlap, leaf.grad)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", list(CASES))
def test_equals_the_specification(device: str, impl: str, name: str, kind: str) -> None:
    logits, probs = inputs(**CASES[name])
    found = value_and_gradient(lambda z: distill_loss(z, probs.to(device), kind=kind, impl=impl), logits.to(device))
    # in float64, whose logits are the given ones
    wanted = value_and_gradient(lambda z: distill_loss(z, probs, kind=kind, impl="torch"), logits)
    assert all(x.isfinite().all() for x in found)
    torch.testing.assert_close(found[0], wanted[0], rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(found[1], wanted[1], rtol=1e-5, atol=1e-5)
    tolerance = 2**-7 if logits.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(
        found[2], wanted[2], rtol=tolerance, atol=tolerance * wanted[2].abs().max().item() + 1e-6
    )


def test_by_hand(device: str, impl: str) -> None:
    """q = (1/5, 4/5), p = (1/2, 3/10): overlap 1/2, cross-entropy (log 5) / 2 - 0.3 log 0.8, gradient 0.8 q - p."""
    logits = torch.tensor([[1.0, 4.0]]).log()
    probs = torch.tensor([[0.5, 0.3]], device=device)
    loss, overlap, grad = value_and_gradient(lambda z: distill_loss(z, probs, impl=impl), logits.to(device))
    assert overlap.item() == pytest.approx(0.5)
    assert loss.item() == pytest.approx(0.5 * math.log(5) - 0.3 * math.log(0.8))
    assert grad.flatten().tolist() == pytest.approx([3 * (0.16 - 0.5), 3 * (0.64 - 0.3)])


@pytest.mark.parametrize("kind", KINDS)
def test_nan_is_not_hidden(device: str, impl: str, kind: str) -> None:
    logits, probs = inputs(**CASES["odd, several blocks"])
    logits[1, 200] = torch.nan
    found = value_and_gradient(lambda z: distill_loss(z, probs.to(device), kind=kind, impl=impl), logits.to(device))
    assert found[0].isnan()
    assert found[2][1].isnan().all()
    assert found[2][[0, 2, 3]].isfinite().all()
