"""Accepted keys and values move to their places: to the bit, in place, and nothing else changes."""

import pytest
import torch
from torch import Tensor

from kernels import native
from kernels.attention.kv_commit import kv_commit

LAYERS, SLOTS, HEADS, LENGTH, LIVE, LONGEST = 2, 4, 2, 40, 3, 6


@pytest.fixture(params=["torch", "triton", "native"])
def impl(request: pytest.FixtureRequest, device: str) -> str:
    if request.param == "native" and (device != "cpu" or native.library() is None):
        pytest.skip("the C kernels do not run here")
    return request.param


def caches(size: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size)
    keys, values = torch.randn(2, LAYERS, SLOTS, HEADS, LENGTH, size, generator=generator).to(dtype).to(device)
    return keys, values


def paths(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Row b's newest token is at 10 + b; its accepted tokens are at ascending places behind it, i-th at i or later."""
    generator = torch.Generator().manual_seed(seed)
    newest = torch.arange(LIVE)[:, None] + 10
    columns = torch.stack([torch.randperm(12, generator=generator)[: LONGEST - 1].sort().values + 1 for _ in newest])
    sources = torch.cat([newest, newest + columns], dim=1)
    targets = newest + torch.arange(LONGEST)
    counts = torch.randint(1, LONGEST + 1, (LIVE, 1), generator=generator)
    return sources, targets, (torch.arange(LONGEST) < counts) & (sources != targets)


@pytest.mark.parametrize(("size", "dtype"), [(16, torch.float32), (20, torch.bfloat16)])
def test_moves_the_path_and_nothing_else(device: str, impl: str, size: int, dtype: torch.dtype) -> None:
    overlaps = 0
    for seed in range(2):
        sources, targets, moved = paths(seed)
        found = caches(size, dtype, device)
        kv_commit(*found, *(x.to(device) for x in (sources, targets, moved)), impl=impl)
        for cache, before in zip(found, caches(size, dtype, "cpu"), strict=True):
            wanted = before.clone()
            for row, step in moved.nonzero().tolist():
                wanted[:, row, :, targets[row, step]] = before[:, row, :, sources[row, step]]
            assert torch.equal(cache.cpu(), wanted)
        overlaps += sum(
            len(set(s[m].tolist()) & set(t[m].tolist())) for s, t, m in zip(sources, targets, moved, strict=True)
        )
    assert overlaps  # places that are read for one token and written for another
