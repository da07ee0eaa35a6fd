"""The fused choice against its specification: the same tokens, log-probabilities to float32 rounding.

Tolerance 4e-6: a few roundings (2^-22) of logits of up to 10 and log-normalisers of up to 20.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.dispatch import jit, tl
from kernels.sampling import coupled_sample as module
from kernels.sampling.coupled_sample import coupled_sample, gumbel_noise
from tests.kernels.sampling.test_coupled_sample import bits_by_hand
from tlt_core.items.types import SamplingParams
from tlt_core.model.sampling import _choose, _choose_for_policy, choose_no_sync, row_keys

CASES = {
    "one block": dict(rows=10, vocab=64, scale=1.0, dtype=torch.float32),
    "odd, several blocks": dict(rows=12, vocab=2 * 256 + 77, scale=2.0, dtype=torch.float32),
    "several blocks a split": dict(rows=4, vocab=9 * 256 + 1, scale=2.0, dtype=torch.float32),
    "one row": dict(rows=1, vocab=1001, scale=2.0, dtype=torch.float32),
    "one token": dict(rows=3, vocab=1, scale=2.0, dtype=torch.float32),
    "bf16": dict(rows=8, vocab=700, scale=2.0, dtype=torch.bfloat16),
    "saturated": dict(rows=8, vocab=700, scale=2000.0, dtype=torch.float32),
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks and several splits from small vocabularies."""
    monkeypatch.setattr(module, "_BLOCK", 256)
    monkeypatch.setattr(module, "_MOST_SPLITS", 4)


def inputs(*, rows: int, vocab: int, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Logits that are a part of a wider tensor, and keys."""
    generator = torch.Generator().manual_seed(rows + vocab)
    logits = (scale * torch.randn(rows, vocab + 3, generator=generator)).to(dtype)[:, :vocab]
    return logits, row_keys(torch.arange(rows) * 977, torch.arange(rows))


def both(device: str, logits: Tensor, keys: Tensor, **options) -> tuple[module.Choice, module.Choice]:
    """Triton on the device and the specification on the CPU."""
    floors = options.pop("floors_N", None)
    found = coupled_sample(
        logits.to(device),
        keys.to(device),
        floors_N=None if floors is None else floors.to(device),
        impl="triton",
        **options,
    )
    wanted = coupled_sample(logits, keys, floors_N=floors, impl="torch", **options)
    return module.Choice(*(x.cpu() for x in found)), wanted


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.7])
@pytest.mark.parametrize("name", list(CASES))
def test_equals_the_specification(device: str, name: str, temperature: float) -> None:
    found, wanted = both(device, *inputs(**CASES[name]), temperature=temperature)
    assert torch.equal(found.tokens_N, wanted.tokens_N)
    scale = max(1.0, CASES[name]["scale"] / 2)
    torch.testing.assert_close(found.logprobs_N, wanted.logprobs_N, rtol=1e-6, atol=4e-6 * scale)
    torch.testing.assert_close(found.lognorms_N, wanted.lognorms_N, rtol=1e-6, atol=4e-6 * scale)


def test_the_same_tokens_on_many_rows(device: str) -> None:
    """120 rows of nearly equal logits: the noise alone decides, and does so alike."""
    logits, keys = inputs(rows=120, vocab=200, scale=0.1, dtype=torch.float32)
    found, wanted = both(device, logits, keys)
    assert torch.equal(found.tokens_N, wanted.tokens_N)
    assert len(set(found.tokens_N.tolist())) > 50


def test_floors_keep_what_top_k_keeps(device: str) -> None:
    logits, keys = inputs(**CASES["odd, several blocks"])
    floors = logits.topk(5, dim=-1).values[:, -1]
    found, wanted = both(device, logits, keys, temperature=1.5, floors_N=floors)
    assert torch.equal(found.tokens_N, wanted.tokens_N)
    assert (logits.gather(1, found.tokens_N[:, None])[:, 0] >= floors).all()
    torch.testing.assert_close(found.logprobs_N, wanted.logprobs_N, rtol=1e-6, atol=4e-6)


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_is_refused(bad: float, impl: str) -> None:
    """On the CPU alone: a failed assertion on a GPU ends the process's use of it."""
    if impl == "triton" and torch.cuda.is_available():
        pytest.skip("no interpreter beside a GPU")
    logits, keys = inputs(**CASES["odd, several blocks"])
    logits[3, 400] = bad
    with pytest.raises(RuntimeError, match="NaN"):
        coupled_sample(logits, keys, impl=impl)


@pytest.mark.parametrize(("temperature", "top_k"), [(0.0, 0), (1.0, 3), (0.7, 10_000)])
def test_sampling_on_a_device_is_the_policys_definition(
    device: str, monkeypatch: pytest.MonkeyPatch, temperature: float, top_k: int
) -> None:
    monkeypatch.setattr("kernels.dispatch._auto", lambda op, kind: True)
    logits, keys = inputs(**CASES["bf16"])
    params = SamplingParams(temperature=temperature, top_k=top_k)
    found = choose_no_sync(logits.to(device), keys.to(device), params)
    wanted = _choose_for_policy(logits, keys, params)
    assert torch.equal(found.tokens_N.cpu(), wanted.tokens_N)
    torch.testing.assert_close(found.logprobs_N.cpu(), wanted.logprobs_N, rtol=1e-6, atol=4e-6)


@jit()
def _noise_kernel(keys, bits, noise, first, BLOCK: tl.constexpr):
    ids = first + tl.arange(0, BLOCK)
    key_0 = tl.load(keys).to(tl.uint32, bitcast=True)
    key_1 = tl.load(keys + 1).to(tl.uint32, bitcast=True)
    tl.store(bits + tl.arange(0, BLOCK), module_hash(ids, key_0, key_1).to(tl.int32))
    tl.store(noise + tl.arange(0, BLOCK), module_gumbel(ids, key_0, key_1))


module_hash, module_gumbel = module._hash, module._gumbel


@pytest.mark.parametrize(("first", "key"), [(0, (0, 0)), (2**31 - 4096, (-1, 7)), (0, (-(2**31), 2**31 - 1))])
def test_bits_are_the_same_and_noise_nearly(device: str, key: tuple[int, int], first: int) -> None:
    """4,096 ids: the integers of the hash as Python computes them; noise within four roundings of float32."""
    keys = torch.tensor(key, dtype=torch.int32)
    bits = torch.empty(4096, dtype=torch.int32, device=device)
    noise = torch.empty(4096, device=device)
    _noise_kernel[(1,)](keys.to(device), bits, noise, first, BLOCK=4096)
    ids = range(first, first + 4096)
    assert bits.tolist() == [bits_by_hand(key[0], key[1], token) for token in ids]
    wanted = gumbel_noise(keys[None], torch.tensor(list(ids), dtype=torch.int32))[0]
    rounding = torch.finfo(torch.float32).eps * wanted.abs().clamp_min(1)
    assert ((noise.cpu() - wanted).abs() <= 4 * rounding).all()


def test_logits_that_the_temperature_makes_equal_stay_together(device: str) -> None:
    """Two neighbouring floats with the same quotient: a floor at the larger keeps both, as `policy_scores` does."""
    larger = torch.tensor(1.5)
    logits = torch.stack([torch.nextafter(larger, torch.tensor(0.0)), larger, torch.tensor(-9.0)]).expand(64, -1)
    temperature = next(t for t in (1.1, 1.3, 1.7, 1.9) if len((logits[0] / t).unique()) == 2)
    keys = row_keys(torch.arange(64) * 977, torch.arange(64))
    found, wanted = both(device, logits.contiguous(), keys, temperature=temperature, floors_N=larger.expand(64))
    assert set(found.tokens_N.tolist()) == {0, 1}
    assert torch.equal(found.tokens_N, wanted.tokens_N)
    assert torch.equal(found.tokens_N, _choose(logits, keys, SamplingParams(temperature=temperature, top_k=1)).tokens_N)
