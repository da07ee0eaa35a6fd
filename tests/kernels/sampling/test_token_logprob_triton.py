"""The fused kernels of token_logprob against the specification, in value and gradient.

Tolerances: as in test_token_logprob.py; in bf16 both round the logits in the same matrix product on the CPU, while a
GPU's product rounds an occasional logit the other way (2^-8 of a logit of up to 4 in the unsaturated cases).
"""

import pytest
import torch
from torch import Tensor

from kernels.sampling import token_logprob as module
from kernels.sampling.token_logprob import linear_token_logprob

CASES = {
    "one block": dict(tokens=9, vocab=64, hidden=16, scale=1.0, dtype=torch.float32),
    "odd, several blocks": dict(tokens=17, vocab=3 * 128 + 5, hidden=24, scale=1.0, dtype=torch.float32),
    "saturated": dict(tokens=9, vocab=301, hidden=24, scale=200.0, dtype=torch.float32),
    "bf16": dict(tokens=19, vocab=301, hidden=24, scale=1.0, dtype=torch.bfloat16),
    "one token": dict(tokens=1, vocab=64, hidden=16, scale=1.0, dtype=torch.float32),
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks of the vocabulary, and several chunks of tokens."""
    monkeypatch.setattr(module, "_BLOCK", 128)
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 64 * 32)


def case(*, tokens: int, vocab: int, hidden: int, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden_TD = (scale * torch.randn(tokens, hidden, generator=generator)).to(dtype)
    weight_VD = (torch.randn(vocab, hidden, generator=generator) / hidden**0.5).to(dtype)
    return hidden_TD, weight_VD, torch.randint(0, vocab, (tokens,), generator=generator)


def value_and_gradient(inputs: tuple[Tensor, Tensor, Tensor], device: str, impl: str, temperature: float):
    hidden_TD, weight_VD, ids_T = (x.to(device) for x in inputs)
    leaves = hidden_TD.requires_grad_(), weight_VD.requires_grad_()
    out = linear_token_logprob(*leaves, ids_T, temperature=temperature, impl=impl)
    share_T = torch.randn(len(ids_T), generator=torch.Generator().manual_seed(1)).to(device)
    grads = torch.autograd.grad((out.logprob_T * share_T).sum(), leaves)
    return [x.detach().float().cpu() for x in (*out, *grads)]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", list(CASES))
def test_equals_the_specification(device: str, name: str, temperature: float) -> None:
    inputs = case(**CASES[name])
    wanted = value_and_gradient(tuple(x.clone() for x in inputs), "cpu", "torch", temperature)
    found = value_and_gradient(tuple(x.clone() for x in inputs), device, "triton", temperature)
    bf16 = inputs[0].dtype == torch.bfloat16
    near = 0.04 if bf16 and device == "cuda" else 1e-5
    # logits of several hundred, which a different order of sums moves by 6e-5
    near, relative = (1e-3, 1e-3) if name == "saturated" else (near, 2**-6 if bf16 else 1e-5)
    for ours, theirs in zip(found[:2], wanted[:2], strict=True):
        assert ours.isfinite().all()
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=near)
    for ours, theirs in zip(found[2:], wanted[2:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=relative * theirs.abs().max().item())


def test_one_nan_logit_is_not_hidden(device: str) -> None:
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(3))
    logits[1, 200] = torch.nan
    results = [torch.zeros(3, device=device) for _ in range(3)]
    module._TRITON.measure(logits.to(device), torch.tensor([0, 0, 0], device=device), 1.0, *results)
    assert all(x.isnan().tolist() == [False, True, False] for x in results)
