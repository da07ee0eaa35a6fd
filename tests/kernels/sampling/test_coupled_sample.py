"""The noise is Gumbel, uncorrelated, and a pure function of (key, token id)."""

import math

import torch

from kernels.sampling.coupled_sample import coupled_argmax, gumbel_noise
from tlt_core.model.sampling import row_keys

IDS = torch.arange(1000, dtype=torch.int32)


def keys(count: int, *, stream: int = 7) -> torch.Tensor:
    return row_keys(torch.full((count,), stream, dtype=torch.int64), torch.arange(count))


def test_known_values_pin_the_stream():
    """The same tokens on every machine and release: the hash is computed here in plain integers."""
    keys_22 = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)
    noise = gumbel_noise(keys_22, torch.tensor([0, 5, 49151], dtype=torch.int32))
    bits = bits_by_hand(1, 2, 5)
    u = min((bits + 0.5) * 2.0**-31, 1 - 2.0**-24)
    assert math.isclose(noise[0, 1].item(), -math.log(-math.log1p(-u)), rel_tol=1e-5)


def bits_by_hand(key_0: int, key_1: int, token: int) -> int:
    word = 0xFFFFFFFF
    x = (token * 0x9E3779B1 ^ key_0) & word
    x ^= x >> 16
    x = x * 0x85EBCA6B & word
    x ^= key_1
    x ^= x >> 13
    x = x * 0xC2B2AE35 & word
    x ^= x >> 16
    return x & 0x7FFFFFFF


def test_noise_is_gumbel():
    """Kolmogorov-Smirnov distance of 10^6 values to the Gumbel law; 1.95 / sqrt(n) is the 0.1 % bound."""
    noise = gumbel_noise(keys(1000), IDS).flatten().double().sort().values
    law = torch.exp(-torch.exp(-noise))
    steps = torch.arange(1, len(noise) + 1) / len(noise)
    assert (law - steps).abs().max() < 1.95 / math.sqrt(len(noise))


def test_rows_and_columns_are_uncorrelated():
    """Neighbouring positions and neighbouring token ids: |r| below 5 / sqrt(n)."""
    noise = gumbel_noise(keys(1000), IDS).double()
    z = (noise - noise.mean()) / noise.std()
    bound = 5 / math.sqrt(noise.numel())
    assert (z[1:] * z[:-1]).mean().abs() < bound
    assert (z[:, 1:] * z[:, :-1]).mean().abs() < bound
    assert (z[1:, 1:] * z[:-1, :-1]).mean().abs() < bound


def test_a_subset_of_ids_sees_the_same_noise():
    """What a drafter with a reduced vocabulary relies on."""
    subset = torch.tensor([3, 999, 17], dtype=torch.int32)
    assert torch.equal(gumbel_noise(keys(5), IDS)[:, subset.long()], gumbel_noise(keys(5), subset))


def test_rare_tokens_are_drawn_as_often_as_they_should():
    """200,000 draws of a law with probabilities down to 1e-4: chi-square, and an impossible one never."""
    p = torch.tensor([0.8989, 0.1, 1e-3, 1e-4, 0.0])
    draws = coupled_argmax(p.log().expand(200_000, -1), keys(200_000), torch.arange(5, dtype=torch.int32))
    counts = torch.bincount(draws, minlength=5).double()
    assert counts[4] == 0
    expected = p.double()[:4] * len(draws)
    assert ((counts[:4] - expected) ** 2 / expected).sum() < 16.27  # chi-square 0.999 quantile, 3 degrees of freedom
