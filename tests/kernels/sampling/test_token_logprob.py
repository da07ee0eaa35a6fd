"""The fused op against its specification, in value and gradient.

Tolerances: float32 differs by the order of sums only.  In bf16 both sides round the logits to 8 bits in the same matrix
product, so log-probs agree to float32 rounding; gradients are rounded to bf16 (2^-8 relative) in different places.
"""

import pytest
import torch
from torch import Tensor

from kernels.sampling import token_logprob
from kernels.sampling.token_logprob import linear_token_logprob

CASES = {
    "float32": dict(tokens=37, vocab=64, hidden=16, scale=1.0, dtype=torch.float32),
    "odd vocabulary": dict(tokens=29, vocab=101, hidden=24, scale=1.0, dtype=torch.float32),
    "saturated": dict(tokens=29, vocab=101, hidden=24, scale=40.0, dtype=torch.float32),
    "bf16": dict(tokens=37, vocab=101, hidden=24, scale=1.0, dtype=torch.bfloat16),
    "bf16 saturated": dict(tokens=37, vocab=64, hidden=16, scale=20.0, dtype=torch.bfloat16),
    "one token": dict(tokens=1, vocab=64, hidden=16, scale=1.0, dtype=torch.float32),
}


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks of several blocks, the last of each incomplete."""
    monkeypatch.setattr(token_logprob, "CHUNK_ELEMENTS", 64 * 16)
    monkeypatch.setattr(token_logprob, "_CACHED_ELEMENTS", 64 * 3)


def _case(tokens: int, vocab: int, hidden: int, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden_TD = (scale * torch.randn(tokens, hidden, generator=generator)).to(dtype).requires_grad_()
    weight_VD = (torch.randn(vocab, hidden, generator=generator) / hidden**0.5).to(dtype).requires_grad_()
    return hidden_TD, weight_VD, torch.randint(0, vocab, (tokens,), generator=generator)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("impl", ["chunked", "native"])
@pytest.mark.parametrize("name", list(CASES))
def test_agrees_with_reference(small_chunks: None, name: str, impl: str, temperature: float) -> None:
    hidden_TD, weight_VD, ids_T = _case(**CASES[name])
    share_T = torch.randn(len(ids_T), generator=torch.Generator().manual_seed(1))
    results = {}
    for chosen in ("torch", impl):
        out = linear_token_logprob(hidden_TD, weight_VD, ids_T, temperature=temperature, impl=chosen)
        grads = torch.autograd.grad((out.logprob_T * share_T).sum(), (hidden_TD, weight_VD))
        results[chosen] = (out, *(g.float() for g in grads))
    (want, *want_grads), (got, *got_grads) = results["torch"], results[impl]
    assert got.logprob_T.dtype == got.entropy_T.dtype == torch.float32
    assert got.logprob_T.isfinite().all()
    torch.testing.assert_close(got.logprob_T, want.logprob_T, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.entropy_T, want.entropy_T, rtol=1e-5, atol=1e-5)
    for got_grad, want_grad in zip(got_grads, want_grads, strict=True):
        tolerance = (2**-6 if hidden_TD.dtype == torch.bfloat16 else 1e-5) * want_grad.abs().max().item()
        torch.testing.assert_close(got_grad, want_grad, rtol=0, atol=tolerance)


@pytest.mark.parametrize("impl", ["chunked", "native"])
def test_backward_twice_gives_the_same(small_chunks: None, impl: str) -> None:
    """The first backward overwrites the logits that forward has kept."""
    hidden_TD, weight_VD, ids_T = _case(**CASES["bf16"])
    total = linear_token_logprob(hidden_TD, weight_VD, ids_T, impl=impl).logprob_T.sum()
    first = torch.autograd.grad(total, (hidden_TD, weight_VD), retain_graph=True)
    for got, want in zip(torch.autograd.grad(total, (hidden_TD, weight_VD)), first, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("at", [0, 4200, 4999])
def test_nan_is_not_hidden_by_c(at: int) -> None:
    """In its row alone, wherever in the vocabulary it stands and whatever token is asked for."""
    logits_CV = torch.randn(3, 5000, generator=torch.Generator().manual_seed(3))
    logits_CV[1, at] = torch.nan
    results = [torch.zeros(3) for _ in range(3)]
    token_logprob._kernels(logits_CV, "native").measure(logits_CV, torch.tensor([7, 7, 7]), 1.0, *results)
    assert all(x.isnan().tolist() == [False, True, False] for x in results)


def test_a_real_vocabulary_is_summed_as_exactly_in_c() -> None:
    """Against float64.  Measured with AVX2 and AVX-512: 1.6e-6 in log-probabilities, where a logit's own rounding is up
    to 1.4e-6, and 4e-7 in entropies."""
    generator = torch.Generator().manual_seed(0)
    hidden_TD, weight_VD = torch.randn(3, 8, generator=generator), torch.randn(49152, 8, generator=generator)
    ids_T = torch.tensor([0, 49151, 20000])
    got = linear_token_logprob(hidden_TD, weight_VD, ids_T, impl="native")
    logp_TV = (hidden_TD.double() @ weight_VD.double().T).log_softmax(-1)  # the reference computes in float32
    want_T, entropy_T = logp_TV.gather(1, ids_T[:, None]).squeeze(1), -(logp_TV.exp() * logp_TV).sum(1)
    torch.testing.assert_close(got.logprob_T.double(), want_T, rtol=0, atol=3e-6)
    torch.testing.assert_close(got.entropy_T.double(), entropy_T, rtol=0, atol=2e-6)


def test_never_holds_all_logits_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor made in forward or backward has as many float32 elements as [T, V]."""
    monkeypatch.setattr(token_logprob, "CHUNK_ELEMENTS", 512 * 16)
    monkeypatch.setattr(token_logprob, "_CACHED_ELEMENTS", 512 * 4)
    hidden_TD, weight_VD, ids_T = _case(tokens=128, vocab=512, hidden=8, scale=1.0, dtype=torch.bfloat16)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.dtype == torch.float32:
                largest = max(largest, out.numel())
            return out

    with Watch():
        linear_token_logprob(hidden_TD, weight_VD, ids_T).logprob_T.sum().backward()
    assert 0 < largest <= 512 * 8  # a block, or the weight gradient
