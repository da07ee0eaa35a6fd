"""The blocks of `draft_attention` against its specification, values and gradients."""

import pytest
import torch

from kernels.attention.draft_attention import Reach, draft_attention, draft_attention_reference

_HEADS = (2, 3, 8)  # K, G, d


def _inputs(reaches: list[Reach], own: int, *, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    (kv, group, size), rows, keys = _HEADS, sum(r.rows for r in reaches), sum(r.keys for r in reaches)
    shapes = [(rows, kv, group, size), (keys, kv, size), (keys, kv, size), (rows, kv, own, size), (rows, kv, own, size)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_(True) for s in shapes]


@pytest.mark.parametrize(
    "reaches",
    [
        [Reach(rows=5, keys=9, first=3)],
        [Reach(rows=70, keys=100, first=28)],  # several blocks, a last one that is not full
        [Reach(rows=40, keys=40, first=-2)],  # the first rows see none but their own keys
        [Reach(rows=3, keys=3, first=-5)],  # no row sees another
        [Reach(rows=33, keys=200, first=160), Reach(rows=1, keys=4, first=2), Reach(rows=64, keys=64, first=-1)],
    ],
)
@pytest.mark.parametrize("own", [1, 4])
def test_blocks_are_the_specification(reaches: list[Reach], own: int) -> None:
    inputs = _inputs(reaches, own)
    expected = draft_attention_reference(*inputs, reaches)
    out = draft_attention(*inputs, reaches, impl="blocked")
    torch.testing.assert_close(out, expected)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    gradients = [torch.autograd.grad(y, inputs, grad, allow_unused=True) for y in (out, expected)]
    for got, wanted in zip(*gradients, strict=True):
        assert wanted is not None
        torch.testing.assert_close(got, wanted)
