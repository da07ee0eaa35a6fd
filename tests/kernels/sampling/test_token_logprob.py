"""The fused op against its specification, in value and gradient.

Tolerances: float32 differs by the order of sums only.  In bf16 both sides round the logits to 8 bits in the same matrix
product, so log-probs agree to float32 rounding; a GPU's product rounds an occasional logit the other way (2^-8 of a
logit of up to 4).  Gradients are rounded to bf16 (2^-8 relative) in different places.
"""

import pytest
import torch
from torch import Tensor

from kernels import native
from kernels.sampling import token_logprob
from kernels.sampling.token_logprob import linear_token_logprob

CASES = {
    "one block": dict(tokens=37, vocab=64, hidden=16, scale=1.0, dtype=torch.float32),
    "odd, several blocks": dict(tokens=29, vocab=3 * 128 + 5, hidden=24, scale=1.0, dtype=torch.float32),
    "saturated": dict(tokens=29, vocab=301, hidden=24, scale=40.0, dtype=torch.float32),
    "bf16": dict(tokens=37, vocab=301, hidden=24, scale=1.0, dtype=torch.bfloat16),
    "bf16 saturated": dict(tokens=37, vocab=64, hidden=16, scale=20.0, dtype=torch.bfloat16),
    "one token": dict(tokens=1, vocab=64, hidden=16, scale=1.0, dtype=torch.float32),
}


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks of several blocks, the last of each incomplete."""
    monkeypatch.setattr(token_logprob, "CHUNK_ELEMENTS", 64 * 16)
    monkeypatch.setattr(token_logprob, "_CACHED_ELEMENTS", 64 * 3)
    monkeypatch.setattr(token_logprob, "_BLOCK", 128)


@pytest.fixture(params=["chunked", "native", "triton"])
def impl(request: pytest.FixtureRequest, device: str) -> str:
    if request.param == "native" and (device != "cpu" or native.library() is None):
        pytest.skip("the C kernels do not run here")
    return request.param


def _case(tokens: int, vocab: int, hidden: int, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden_TD = (scale * torch.randn(tokens, hidden, generator=generator)).to(dtype)
    weight_VD = (torch.randn(vocab, hidden, generator=generator) / hidden**0.5).to(dtype)
    return hidden_TD, weight_VD, torch.randint(0, vocab, (tokens,), generator=generator)


def value_and_gradient(inputs: tuple[Tensor, ...], device: str, impl: str, temperature: float) -> list[Tensor]:
    hidden_TD, weight_VD, ids_T = (x.to(device, copy=True) for x in inputs)
    leaves = hidden_TD.requires_grad_(), weight_VD.requires_grad_()
    out = linear_token_logprob(*leaves, ids_T, temperature=temperature, impl=impl)
    assert out.logprob_T.dtype == out.entropy_T.dtype == torch.float32
    share_T = torch.randn(len(ids_T), generator=torch.Generator().manual_seed(1)).to(device)
    grads = torch.autograd.grad((out.logprob_T * share_T).sum(), leaves)
    return [x.detach().float().cpu() for x in (*out, *grads)]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", list(CASES))
def test_agrees_with_reference(small_chunks: None, device: str, name: str, impl: str, temperature: float) -> None:
    inputs = _case(**CASES[name])
    wanted = value_and_gradient(inputs, "cpu", "torch", temperature)
    found = value_and_gradient(inputs, device, impl, temperature)
    is_bf16 = inputs[0].dtype == torch.bfloat16
    for ours, theirs in zip(found[:2], wanted[:2], strict=True):
        assert ours.isfinite().all()
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0.04 if is_bf16 and device == "cuda" else 1e-5)
    for ours, theirs in zip(found[2:], wanted[2:], strict=True):
        tolerance = (2**-6 if is_bf16 else 1e-5) * theirs.abs().max().item()
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


def test_backward_twice_gives_the_same(small_chunks: None, device: str, impl: str) -> None:
    """The first backward overwrites the logits that forward has kept."""
    hidden_TD, weight_VD, ids_T = (x.to(device) for x in _case(**CASES["bf16"]))
    hidden_TD.requires_grad_(), weight_VD.requires_grad_()
    total = linear_token_logprob(hidden_TD, weight_VD, ids_T, impl=impl).logprob_T.sum()
    first = torch.autograd.grad(total, (hidden_TD, weight_VD), retain_graph=True)
    for got, want in zip(torch.autograd.grad(total, (hidden_TD, weight_VD)), first, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("at", [0, 4200, 4999])
def test_nan_is_not_hidden(device: str, impl: str, at: int) -> None:
    """In its row alone, wherever in the vocabulary it stands and whatever token is asked for."""
    logits_CV = torch.randn(3, 5000, generator=torch.Generator().manual_seed(3))
    logits_CV[1, at] = torch.nan
    logits_CV, ids_C = logits_CV.to(device), torch.tensor([7, 7, 7], device=device)
    results = [torch.zeros(3, device=device) for _ in range(3)]
    token_logprob._kernels(logits_CV, impl).measure(logits_CV, ids_C, 1.0, *results)
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
    hidden_TD.requires_grad_(), weight_VD.requires_grad_()
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
