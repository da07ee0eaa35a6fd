"""The gated activation of training against plain operations: equal to the bit in float32; in bfloat16 rounded once."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.layers.swiglu import swiglu


@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_float32(scale: float) -> None:
    gate_up, grad = _case(scale, torch.float32)
    gate, up = gate_up.chunk(2, dim=-1)
    want, got = F.silu(gate) * up, swiglu(gate_up)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    (got_grad,), (want_grad,) = (torch.autograd.grad(y, gate_up, grad) for y in (got, want))
    torch.testing.assert_close(got_grad, want_grad, rtol=0, atol=0)
    with torch.no_grad():
        torch.testing.assert_close(swiglu(gate_up), want, rtol=0, atol=0)


@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_bfloat16_is_rounded_once(scale: float) -> None:
    gate_up, grad = _case(scale, torch.bfloat16)
    gate, up = gate_up.double().chunk(2, dim=-1)
    want, got = F.silu(gate) * up, swiglu(gate_up)
    torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=1e-30)  # one rounding; atol: where silu underflows
    (got_grad,) = torch.autograd.grad(got, gate_up, grad)
    (want_grad,) = torch.autograd.grad(want, gate_up, grad.double())
    # one rounding on either side; atol: the gate's derivative passes through zero and is the difference of two terms
    torch.testing.assert_close(got_grad, want_grad.bfloat16(), rtol=2**-7, atol=1e-6 * scale)
    with torch.no_grad():
        assert torch.equal(swiglu(gate_up), got), "the same with and without a gradient"


def _case(scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """An odd number of columns: the last vector is not full."""
    generator = torch.Generator().manual_seed(0)
    gate_up = (scale * torch.randn(13, 74, generator=generator)).to(dtype).requires_grad_()
    return gate_up, torch.randn(13, 37, generator=generator).to(dtype)
