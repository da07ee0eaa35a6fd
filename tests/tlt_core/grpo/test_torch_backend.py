"""The gradient's norm, by which it is clipped, of as many elements as a model has."""

import pytest
import torch

from tlt_core.grpo.torch_backend import flat_norm


@pytest.mark.parametrize("count", [1, 1000, 20_000_001])
def test_the_norm_of_a_long_vector_is_exact(count: int) -> None:
    values = torch.randn(count, generator=torch.Generator().manual_seed(0)) * 1e-3
    assert float(flat_norm(values)) == pytest.approx(float(values.double().norm()), rel=1e-5)
