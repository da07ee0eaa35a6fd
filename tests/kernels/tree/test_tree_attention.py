"""Attention with lengths on the device against the formula in float64: ragged lengths, trees, levels, split keys.

Tolerances: float32 rounding of sums of up to 300 terms; in bf16 one rounding of the probabilities (2^-9 each, which
average out) and one of the output (2^-9 of values of up to 3).
"""

import pytest
import torch
from torch import Tensor

from kernels.tree import tree_attention as module
from kernels.tree.tree_attention import tree_attention

# requests, key/value heads, grouped heads, head size, tokens, nodes, length of the cache
CASES = {
    "decode": (3, 2, 3, 16, 1, 1, 60),
    "long keys": (2, 1, 2, 16, 1, 1, 300),
    "tree": (2, 2, 3, 32, 5, 5, 90),
    "level of a tree": (2, 2, 2, 16, 3, 9, 70),
    "more rows than a block": (1, 1, 5, 16, 15, 15, 48),
    "odd head size": (2, 1, 1, 20, 3, 3, 20),
    "no known keys": (2, 2, 1, 16, 4, 4, 40),
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks and several splits from short contexts."""
    monkeypatch.setattr(module, "_BLOCK_KEYS", 16)
    monkeypatch.setattr(module, "_MOST_SPLITS", 4)


def inputs(name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Queries, views of longer and wider caches, lengths, and what a token sees of the nodes: the first, then some."""
    live, num_kv, grouped, size, width, nodes, length = CASES[name]
    generator = torch.Generator().manual_seed(length)
    q = torch.randn(live, num_kv, width * grouped, size, generator=generator)
    keys, values = torch.randn(2, live + 2, num_kv, length + 9, size, generator=generator)
    bases = torch.randint(0, length - nodes, (live,), generator=generator)
    bases[0] = 0 if name == "no known keys" else length - nodes
    sees = torch.rand(live, width, nodes, generator=generator) < 0.5
    sees[:, :, 0] = True
    return q.to(dtype), keys[:live, :, :length].to(dtype), values[:live, :, :length].to(dtype), bases, sees


def by_hand(q: Tensor, keys: Tensor, values: Tensor, bases: Tensor, sees: Tensor) -> Tensor:
    """One query row at a time."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    grouped = q.shape[2] // sees.shape[1]
    for b, k, n in torch.cartesian_prod(*(torch.arange(size) for size in q.shape[:3])).tolist():
        base = int(bases[b])
        seen = [*range(base), *(base + u for u in range(sees.shape[2]) if sees[b, n // grouped, u])]
        if seen:
            scores = keys[b, k, seen].double() @ q[b, k, n].double() * q.shape[-1] ** -0.5
            out[b, k, n] = scores.softmax(0) @ values[b, k, seen].double()
    return out


def attend(device: str, *tensors: Tensor, impl: str = "triton") -> Tensor:
    q, keys, values, bases, sees = tensors
    on = (_on(device, keys), _on(device, values))
    return tree_attention(q.to(device), *on, bases.to(device), sees.to(device), impl=impl).cpu()


def _on(device: str, cache: Tensor) -> Tensor:
    """With the strides of a view, which a plain copy would lose."""
    return torch.cat([cache, cache[:, :, :1]], dim=2).to(device)[:, :, :-1]


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", list(CASES))
def test_equals_the_formula(device: str, name: str, dtype: torch.dtype, impl: str) -> None:
    case = inputs(name, dtype)
    found = attend(device, *case, impl=impl)
    assert found.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(found.double(), by_hand(*case), atol=tolerance, rtol=tolerance)


def test_what_lies_behind_the_last_node_is_not_read(device: str) -> None:
    """A slot keeps what its last request left there: NaN in it must not matter."""
    q, keys, values, bases, sees = inputs("long keys", torch.float32)
    wanted = attend(device, q, keys, values, bases, sees)
    end = int(bases[1]) + 1
    assert end < keys.shape[2]
    for cache in (keys, values):
        cache[1, :, end:] = torch.nan
    assert torch.equal(attend(device, q, keys, values, bases, sees), wanted)


def test_nan_in_a_visible_key_is_not_hidden(device: str) -> None:
    q, keys, values, bases, sees = inputs("decode", torch.float32)
    keys[1, 0, 0] = torch.nan
    assert bases[1] > 0
    found = attend(device, q, keys, values, bases, sees)
    assert found[1, 0].isnan().all()
    assert found[[0, 2]].isfinite().all()
    assert found[1, 1].isfinite().all()


def test_a_token_that_sees_nothing_is_zero_and_an_empty_batch_is_empty(device: str) -> None:
    q, keys, values, bases, sees = inputs("no known keys", torch.float32)
    sees[0, 2] = False
    found = attend(device, q, keys, values, bases, sees)
    assert (found[0, :, 2] == 0).all()
    torch.testing.assert_close(found.double(), by_hand(q, keys, values, bases, sees), atol=1e-5, rtol=1e-5)
    assert attend(device, q[:0], keys[:0], values[:0], bases[:0], sees[:0]).shape == (0, 2, 4, 16)
