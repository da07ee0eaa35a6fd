"""The rotary embedding against plain operations, and its gradient against float64."""

import pytest
import torch
from torch import Tensor

from kernels.layers.rotate import rotate


def _angles(tokens: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angles = torch.arange(tokens).double()[:, None, None] * torch.logspace(0, -3, size // 2).double()
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


@pytest.mark.parametrize(("heads", "size"), [(3, 64), (1, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_value_and_gradient(dtype: torch.dtype, heads: int, size: int) -> None:
    """x is a part of a wider tensor, as queries and keys are."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(37, heads + 2, size, generator=generator).to(dtype).requires_grad_()
    grad = torch.randn(37, heads, size, generator=generator).to(dtype)
    cos, signed_sin = _angles(37, size, dtype)
    x, exact = wide[:, :heads], wide.double()[:, :heads]
    want = exact * cos.double() + exact.roll(size // 2, -1) * signed_sin.double()
    got = rotate(x, cos, signed_sin)
    # float32: three roundings of 2^-24 each, of terms that may cancel; bfloat16: one of the result (2^-9 of a value up
    # to 1, 2^-8 by the definition of a relative bound above it).  A gradient is a sum of two such products.
    apart = dict(rtol=1e-5, atol=1e-6) if dtype == torch.float32 else dict(rtol=2**-8, atol=2**-9)
    torch.testing.assert_close(got.double(), want, **apart)
    (got_grad,) = torch.autograd.grad(got, wide, grad)
    (want_grad,) = torch.autograd.grad(want, wide, grad.double())
    torch.testing.assert_close(got_grad.double(), want_grad.double(), rtol=apart["rtol"] * 2, atol=apart["atol"] * 2)
