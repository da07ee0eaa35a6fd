"""Attention over the slot cache in Triton against the formula in float64: ragged batches, tree masks, split keys.

Tolerances: float32 rounding of sums of up to 300 terms; in bf16 one rounding of the probabilities (2^-9 each, which
average out) and one of the output (2^-9 of values of up to 3).
"""

import pytest
import torch
from torch import Tensor

from kernels import slot_attention as module
from kernels.slot_attention import SlotMask, slot_attention

# requests, key/value heads, grouped heads, head size, tokens, keys
CASES = {
    "decode": (3, 2, 3, 16, 1, 40),
    "long keys": (2, 1, 2, 16, 1, 300),
    "tree": (2, 2, 3, 32, 5, 90),
    "more rows than a block": (1, 1, 5, 16, 15, 33),
    "odd head size": (2, 1, 1, 20, 3, 17),
    "one head a query": (2, 3, 1, 64, 2, 70),
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks and several splits from short contexts."""
    monkeypatch.setattr(module, "_BLOCK_KEYS", 16)
    monkeypatch.setattr(module, "_MOST_SPLITS", 4)


def inputs(name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, views of longer and wider caches, and what a token sees: a prefix of its own length, then some."""
    live, num_kv, grouped, size, width, seen = CASES[name]
    generator = torch.Generator().manual_seed(seen)
    q = torch.randn(live, num_kv, width * grouped, size, generator=generator)
    keys, values = torch.randn(2, live + 2, num_kv, seen + 9, size, generator=generator)
    lengths = torch.randint(1, seen - width, (live, 1, 1), generator=generator)
    lengths[0] = seen - width
    at = torch.arange(seen)
    ancestors = (torch.rand(live, width, seen, generator=generator) < 0.5) & (at < lengths + width)
    visible = (at < lengths) | ancestors
    return q.to(dtype), keys[:live, :, :seen].to(dtype), values[:live, :, :seen].to(dtype), visible


def by_hand(q: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    mask = visible.repeat_interleave(q.shape[2] // visible.shape[1], dim=1)[:, None]
    scores = (q.double() @ keys.double().mT) * q.shape[-1] ** -0.5
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ values.double()


def attend(device: str, q: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    grouped = q.shape[2] // visible.shape[1]
    mask = SlotMask.of(visible.to(device), num_kv=q.shape[1], grouped=grouped, dtype=q.dtype, impl="triton")
    return slot_attention(q.to(device), _on(device, keys), _on(device, values), mask).cpu()


def _on(device: str, cache: Tensor) -> Tensor:
    """With the strides of a view, which a plain copy would lose."""
    return torch.cat([cache, cache[:, :, :1]], dim=2).to(device)[:, :, :-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", list(CASES))
def test_equals_the_formula(device: str, name: str, dtype: torch.dtype) -> None:
    q, keys, values, visible = inputs(name, dtype)
    found = attend(device, q, keys, values, visible)
    assert found.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(found.double(), by_hand(q, keys, values, visible), atol=tolerance, rtol=tolerance)


def test_saturated_scores(device: str) -> None:
    """One key takes all: the output is its value, to the bit."""
    q, keys, values, visible = inputs("tree", torch.float32)
    found = attend(device, q * 1e4, keys, values, visible)
    torch.testing.assert_close(found.double(), by_hand(q * 1e4, keys, values, visible), atol=1e-5, rtol=1e-5)


def test_what_lies_behind_the_last_visible_key_is_not_read(device: str) -> None:
    """A slot keeps what its last request left there: NaN in it must not matter."""
    q, keys, values, visible = inputs("long keys", torch.float32)
    wanted = attend(device, q, keys, values, visible)
    last = int(visible[1].any(0).nonzero().max())
    assert last + 1 < keys.shape[2]
    for cache in (keys, values):
        cache[1, :, last + 1 :] = torch.nan
    assert torch.equal(attend(device, q, keys, values, visible), wanted)


def test_nan_in_a_visible_key_is_not_hidden(device: str) -> None:
    q, keys, values, visible = inputs("decode", torch.float32)
    keys[1, 0, 0] = torch.nan
    found = attend(device, q, keys, values, visible)
    assert found[1, 0].isnan().all()
    assert found[[0, 2]].isfinite().all()
    assert found[1, 1].isfinite().all()


def test_a_token_that_sees_nothing_is_zero_and_an_empty_batch_is_empty(device: str) -> None:
    q, keys, values, visible = inputs("tree", torch.float32)
    visible[1, 2] = False
    found = attend(device, q, keys, values, visible)
    assert (found[1, :, 6:9] == 0).all()
    torch.testing.assert_close(found[0].double(), by_hand(q, keys, values, visible)[0], atol=1e-5, rtol=1e-5)
    assert attend(device, q[:0], keys[:0], values[:0], visible[:0]).shape == (0, 2, 15, 32)
