"""The gated activation of training against plain operations: equal to the bit in value and gradient."""

import pytest
import torch
import torch.nn.functional as F

from kernels.layers.swiglu import swiglu


@pytest.mark.parametrize("scale", [1.0, 100.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_value_and_gradient(dtype: torch.dtype, scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    gate_up = (scale * torch.randn(13, 14, generator=generator)).to(dtype).requires_grad_()
    grad = torch.randn(13, 7, generator=generator).to(dtype)
    gate, up = gate_up.chunk(2, dim=-1)
    want = F.silu(gate) * up
    got = swiglu(gate_up)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    (got_grad,), (want_grad,) = (torch.autograd.grad(y, gate_up, grad) for y in (got, want))
    torch.testing.assert_close(got_grad, want_grad, rtol=0, atol=0)
    with torch.no_grad():
        torch.testing.assert_close(swiglu(gate_up), want, rtol=0, atol=0)


def test_by_hand() -> None:
    """a = ln 3: sigmoid 3/4; y = 0.75 ln 3 * 2; dy/da = 2 (0.75 + ln 3 * 0.75 * 0.25); dy/db = 0.75 ln 3."""
    log3 = 1.0986123
    gate_up = torch.tensor([log3, 2.0], requires_grad=True)
    y = swiglu(gate_up)
    assert y.item() == pytest.approx(1.5 * log3, rel=1e-6)
    y.sum().backward()
    assert gate_up.grad.tolist() == pytest.approx([2 * (0.75 + log3 * 0.1875), 0.75 * log3], rel=1e-6)


def test_keeps_its_input_alone() -> None:
    gate_up = torch.randn(8, 6, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        swiglu(gate_up)
    assert [t.data_ptr() for t in kept] == [gate_up.data_ptr()]
