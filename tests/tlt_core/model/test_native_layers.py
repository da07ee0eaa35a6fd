"""The decoder's layers in C: the torch decoder's numbers, and each token's own whoever else is in the pass."""

import copy
import dataclasses

import pytest
import torch

from kernels.attention.packed_attention import packed_causal_attention
from tlt_core.model.load import random_decoder
from tlt_core.model.packed import pack_linears
from tlt_core.rollout.kv_cache import SlotCache

pytestmark = pytest.mark.usefixtures("cpu_kernels")

TAPS = (0, 2, 3)
LENGTHS = (37, 5, 16)


@pytest.fixture(params=[("llama", 64), ("qwen2", 64), ("qwen3", 128)], ids=lambda p: p[0])
def config(request, tiny_config):
    """Grouped heads, with and without biases and norms of queries and keys; sizes that are no multiples of a panel."""
    family, head_dim = request.param
    return dataclasses.replace(
        tiny_config,
        family=family,
        head_dim=head_dim,
        hidden_size=104,
        intermediate_size=144,
        num_layers=3,
        vocab_size=100,
    )


def decoder_of(config):
    """The same weights, rounded to bfloat16: computed in float32, in bfloat16, and packed."""
    rounded = random_decoder(config, seed=0, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in rounded.parameters():
            parameter += torch.randn(parameter.shape, generator=generator) * 0.05
    rounded.bfloat16()
    exact, fast = copy.deepcopy(rounded).float(), copy.deepcopy(rounded)
    pack_linears(fast)
    assert fast.packed_layers is not None
    return exact, rounded, fast


def prompts(num: int = 3):
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(0, 100, (n,), generator=generator) for n in LENGTHS[:num]]


def packed(sequences):
    offsets = torch.tensor([0, *map(len, sequences)]).cumsum(0)
    return torch.cat(list(sequences)), torch.cat([torch.arange(len(s)) for s in sequences]), offsets


def reference(decoder, sequences):
    tokens, positions, offsets = packed(sequences)

    def attend(layer, q, k, v):
        return packed_causal_attention(q, k, v, offsets)

    return decoder(tokens, positions, attend, taps=TAPS)


def cache_of(decoder):
    return SlotCache(decoder.config, num_slots=4, max_len=64, dtype=torch.bfloat16, device=torch.device("cpu"))


@torch.inference_mode()
def test_numbers_are_the_decoders(config):
    exact, rounded, fast = decoder_of(config)
    sequences = prompts()
    tokens, positions, offsets = packed(sequences)
    found = fast(tokens, positions, cache_of(fast).prefill_attend([2, 0, 1], offsets, [0, 0, 0]), taps=TAPS)
    wanted = reference(exact, sequences)
    plain = reference(rounded, sequences)
    for ours, torchs, truth in zip(found, plain, wanted, strict=True):
        scale = truth.float().square().mean().sqrt()
        error, usual = ((x.float() - truth.float()).square().mean().sqrt() / scale for x in (ours, torchs))
        assert error <= 1.2 * usual, (error, usual)
        assert usual < 0.1, "the comparison would say nothing"


@torch.inference_mode()
def test_a_token_is_the_same_in_every_pass(config):
    """A prompt alone, in a batch, and token by token: hidden states, taps and cache, to the bit."""
    *_, fast = decoder_of(config)
    sequences = prompts()
    together = cache_of(fast)
    tokens, positions, offsets = packed(sequences)
    all_at_once = fast(tokens, positions, together.prefill_attend([0, 1, 2], offsets, [0, 0, 0]), taps=TAPS)
    for slot, sequence in enumerate(sequences):
        part = slice(int(offsets[slot]), int(offsets[slot + 1]))
        single = cache_of(fast)
        alone = fast(
            sequence,
            torch.arange(len(sequence)),
            single.prefill_attend([0], torch.tensor([0, len(sequence)]), [0]),
            taps=TAPS,
        )
        in_parts, parts = cache_of(fast), []
        for begin, end in ((0, 3), (3, len(sequence))):  # as the turns of an episode
            attend = in_parts.prefill_attend([0], torch.tensor([0, end - begin]), [begin])
            parts.append(fast(sequence[begin:end], torch.arange(begin, end), attend, taps=TAPS))
        stepped, steps = cache_of(fast), []
        for place, token in enumerate(sequence):
            at = torch.tensor([place])
            steps.append(fast(token[None], at, stepped.decode_attend(at, place + 1), taps=TAPS))
        for field in ("last_TD", "taps_TE"):
            whole = getattr(all_at_once, field)[part]
            assert torch.equal(getattr(alone, field), whole)
            assert torch.equal(torch.cat([getattr(part, field) for part in parts]), whole)
            assert torch.equal(torch.cat([getattr(step, field) for step in steps]), whole)
        for kept in (single, in_parts, stepped):
            known = slice(0, len(sequence))
            assert torch.equal(kept.keys_YSKCd[:, 0, :, known], together.keys_YSKCd[:, slot, :, known])
            assert torch.equal(kept.values_YSKCd[:, 0, :, known], together.values_YSKCd[:, slot, :, known])


def test_heads_of_another_size_stay_with_torch(tiny_config):
    decoder = random_decoder(dataclasses.replace(tiny_config, head_dim=32), seed=0, dtype=torch.bfloat16)
    pack_linears(decoder)
    assert decoder.packed_layers is None
    assert decoder.packed_head is not None
