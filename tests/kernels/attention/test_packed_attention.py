"""Packed attention against a masked softmax written out, in value and gradient, and its causality."""

import pytest
import torch

from kernels.attention.packed_attention import packed_causal_attention, packed_causal_attention_reference

OFFSETS = torch.tensor([0, 1, 6, 300, 333])  # one token; short; longer than two blocks; a ragged rest
IMPLS = [{"impl": "sdpa"}, {"impl": "blocked"}, {"impl": "blocked", "together": True}]


def masked(q, k, v, offsets):
    """One softmax over all tokens with a block-diagonal causal mask, keys and values repeated for their queries."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    sequence = torch.bucketize(torch.arange(len(q)), offsets[1:], right=True)
    visible = (sequence[:, None] == sequence) & (torch.arange(len(q))[:, None] >= torch.arange(len(q)))
    scores = torch.einsum("thd,jhd->htj", q, k) / q.shape[-1] ** 0.5
    return torch.einsum("htj,jhd->thd", scores.masked_fill(~visible, -torch.inf).softmax(-1), v)


def inputs(dtype=torch.float32, heads=(6, 2), size=8, scale=2.0):
    """Scores of a few units; views of one tensor, as the decoder gives them."""
    generator = torch.Generator().manual_seed(0)
    joint = torch.randn(333, heads[0] + 2 * heads[1], size, generator=generator) * scale
    return tuple(x.to(dtype).requires_grad_() for x in joint.split((heads[0], heads[1], heads[1]), dim=1))


def value_and_gradients(attention, leaves, dtype):
    out = attention(*leaves)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    return out, *torch.autograd.grad(out, leaves, weights)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("heads", [(6, 2), (4, 4), (5, 1)])
def test_value_and_gradient_equal_the_masked_softmax(impl, heads):
    leaves = inputs(heads=heads)
    ours = value_and_gradients(lambda *x: packed_causal_attention(*x, OFFSETS, **impl), leaves, torch.float32)
    wide = tuple(x.detach().double().requires_grad_() for x in leaves)
    expected = value_and_gradients(lambda *x: masked(*x, OFFSETS), wide, torch.float64)
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a.double(), b, atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("impl", IMPLS)
def test_bfloat16_is_as_near_as_its_roundings(impl):
    """Against the same inputs in float64: mean error of a few bfloat16 roundings (2^-9) of values of one unit."""
    leaves = inputs(torch.bfloat16, scale=1.0)
    ours = value_and_gradients(lambda *x: packed_causal_attention(*x, OFFSETS, **impl), leaves, torch.bfloat16)
    wide = tuple(x.detach().double().requires_grad_() for x in leaves)
    expected = value_and_gradients(lambda *x: masked(*x, OFFSETS), wide, torch.float64)
    for a, b in zip(ours, expected, strict=True):
        assert a.dtype == torch.bfloat16
        assert (a - b).abs().mean() < 5e-3 * b.abs().mean() + 1e-3


def grouped_varlen_attn(q, k, v, offsets, key_offsets, max_q, max_k, *, window_size, enable_gqa=False):
    """The signature of newer versions of torch, on a CPU."""
    assert window_size == (-1, 0)
    assert enable_gqa or q.shape[1] == k.shape[1], "as torch's own: heads must be equal in number"
    return packed_causal_attention_reference(q, k, v, offsets, key_offsets)


def plain_varlen_attn(q, k, v, offsets, key_offsets, max_q, max_k, *, window_size):
    """torch 2.11's signature."""
    return grouped_varlen_attn(q, k, v, offsets, key_offsets, max_q, max_k, window_size=window_size)


@pytest.mark.parametrize(
    ("varlen_attn", "heads"), [(grouped_varlen_attn, (6, 2)), (plain_varlen_attn, (6, 2)), (plain_varlen_attn, (4, 4))]
)
def test_varlen_attn_of_older_torch_gets_repeated_keys_and_values(monkeypatch, varlen_attn, heads):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    leaves = inputs(heads=heads)
    ours = value_and_gradients(lambda *x: packed_causal_attention(*x, OFFSETS, impl="varlen"), leaves, torch.float32)
    expected = value_and_gradients(lambda *x: masked(*x, OFFSETS), leaves, torch.float32)
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, atol=5e-5, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["sdpa", "auto"])
def test_on_a_gpu(impl):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    leaves = tuple(x.detach().cuda().requires_grad_() for x in inputs(torch.bfloat16, size=64, scale=1.0))
    ours = packed_causal_attention(*leaves, OFFSETS, impl=impl)
    expected = masked(*(x.detach().double().cpu() for x in leaves), OFFSETS)
    torch.testing.assert_close(ours.double().cpu(), expected, atol=3e-2, rtol=3e-2)


def test_sequences_that_share_products_equal_those_alone() -> None:
    """Up to rounding in float32.  Of all lengths, some longer than a block, in no order."""
    lengths = torch.tensor([40, 3, 141, 38, 1, 41, 9, 10])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    leaves = tuple(x.detach()[: int(offsets[-1])].clone().requires_grad_() for x in inputs())
    both = [
        value_and_gradients(
            lambda *x, t=together: packed_causal_attention(*x, offsets, impl="blocked", together=t),
            leaves,
            torch.float32,
        )
        for together in (True, False)
    ]
    for a, b in zip(*both, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("impl", IMPLS)
def test_responses_that_share_a_prompt_equal_full_sequences(impl):
    """A prompt of 5 tokens and responses of 1 and 150, against the two sequences 5 + 1 and 5 + 150 in full."""
    prompt, first, second = torch.arange(5), torch.arange(5, 6), torch.arange(6, 156)
    leaves = tuple(x.detach()[:156].clone().requires_grad_() for x in inputs())

    def shared(q, k, v):
        rows = torch.cat([prompt, prompt, first, prompt, second])
        return packed_causal_attention(
            q, k[rows], v[rows], torch.tensor([0, 5, 6, 156]), key_offsets_S1=torch.tensor([0, 5, 11, 166]), **impl
        )

    def full(q, k, v):
        rows = torch.cat([prompt, first, prompt, second])
        out = masked(q[rows], k[rows], v[rows], torch.tensor([0, 6, 161]))
        return torch.cat([out[:6], out[11:]])  # the second copy of the prompt is left out

    ours = value_and_gradients(shared, leaves, torch.float32)
    wide = tuple(x.detach().double().requires_grad_() for x in leaves)
    for a, b in zip(ours, value_and_gradients(full, wide, torch.float64), strict=True):
        torch.testing.assert_close(a.double(), b, atol=5e-5, rtol=1e-4)
