"""Attention over a cache with rows apart: the copying path against float32 arithmetic, with ragged and tree masks."""

import pytest
import torch

from kernels.attention.slot_attention import SlotMask, slot_attention, slot_attention_reference

B, K, G, D = 3, 2, 3, 16


def inputs(width: int, seen: int) -> tuple[torch.Tensor, ...]:
    """Queries, a part of a longer and wider cache, and a mask in which every token sees some keys, each others."""
    generator = torch.Generator().manual_seed(width * 1000 + seen)
    q = torch.randn(B, K, width * G, D, generator=generator)
    keys, values = torch.randn(2, B + 4, K, seen + 9, D, generator=generator)
    visible = torch.rand(B, width, seen, generator=generator) < 0.5
    visible[..., 0] = True
    return q, keys[:B, :, :seen], values[:B, :, :seen], visible


def by_hand(q, keys, values, visible):
    """The formula in float64."""
    mask = visible.repeat_interleave(G, dim=1)[:, None]
    scores = (q.double() @ keys.double().mT) * D**-0.5
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ values.double()


@pytest.mark.parametrize(("width", "seen"), [(1, 7), (1, 700), (5, 90), (11, 130)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_formula(width, seen, dtype):
    q, keys, values, visible = (x.to(dtype) if x.is_floating_point() else x for x in inputs(width, seen))
    mask = SlotMask.of(visible, num_kv=K, grouped=G, dtype=dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    for out in (slot_attention(q, keys, values, mask), slot_attention_reference(q, keys, values, mask)):
        torch.testing.assert_close(out.double(), by_hand(q, keys, values, visible), atol=tolerance, rtol=tolerance)
