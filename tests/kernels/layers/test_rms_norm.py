"""Training's RMSNorm against torch's: the same values to the bit in float32, and the gradient of a float64 computation.

In bfloat16 C adds the squares in another order, so a value may be rounded the other way.

Tolerances are relative to the gradient's norm: float32 rounding, and one rounding to bf16 (2^-9).
"""

import pytest
import torch
import torch.nn.functional as F

from kernels.layers import rms_norm as module
from kernels.layers.rms_norm import rms_norm


@pytest.mark.parametrize(("shape", "scale"), [((1, 16), 1.0), ((37, 24), 1e-3), ((8, 5, 12), 1e3), ((130, 40), 1.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_value_and_gradient(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, scale: float, shape: tuple[int, ...]
) -> None:
    monkeypatch.setattr(module, "_CACHED_ELEMENTS", 100)  # several blocks, the last one incomplete
    generator = torch.Generator().manual_seed(0)
    x = (scale * torch.randn(shape, generator=generator)).to(dtype).requires_grad_()
    weight = (1 + 0.3 * torch.randn(shape[-1], generator=generator)).to(dtype).requires_grad_()
    grad = torch.randn(shape, generator=generator).to(dtype)
    got = rms_norm(x, weight, eps=1e-5)
    assert got.dtype == dtype
    apart = 0 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(got, F.rms_norm(x, weight.shape, weight, 1e-5), rtol=apart, atol=0)
    with torch.no_grad():
        torch.testing.assert_close(rms_norm(x, weight, eps=1e-5), got, rtol=0, atol=0)
    got_grads = torch.autograd.grad(got, (x, weight), grad)
    exact = F.rms_norm(x.double(), weight.shape, weight.double(), 1e-5)
    for got_grad, want in zip(got_grads, torch.autograd.grad(exact, (x, weight), grad.double()), strict=True):
        tolerance = 1e-6 if dtype == torch.float32 else 2**-9
        assert (got_grad.double() - want).norm() <= tolerance * want.double().norm()


def test_half_precision_rows_with_float32_weights(recwarn):
    """What autocast makes of it, with and without a gradient: the same values, and no complaint."""
    generator = torch.Generator().manual_seed(5)
    x, weight = torch.randn(7, 48, generator=generator).bfloat16(), torch.rand(48, generator=generator) + 0.5
    with torch.no_grad():
        plain = rms_norm(x, weight, eps=1e-5)
    trained = rms_norm(x.requires_grad_(), weight, eps=1e-5)
    assert plain.dtype == torch.bfloat16
    assert torch.equal(plain, trained)
    assert not [w for w in recwarn if "rms_norm" in str(w.message)]
