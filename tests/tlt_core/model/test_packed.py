"""Pre-packed weights give what the plain ones give, before and after an update: oneDNN's layout to the bit, the CPU's
own panels too, but for processors with matrix tiles, where the two sum in different orders and agree up to rounding."""

import dataclasses

import pytest
import torch

from kernels import native
from tlt_core.model import packed as packed_module
from tlt_core.model.config import ModelError
from tlt_core.model.load import random_decoder
from tlt_core.model.packed import can_pack, pack_linears


def attend(layer, q, k, v):
    return q + v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)


def logits(decoder, num_tokens: int):
    with torch.inference_mode():
        return decoder.logits(decoder(torch.arange(num_tokens), torch.arange(num_tokens), attend).last_TD)


def bfloat16_decoder(config, seed: int):
    decoder = random_decoder(config, seed=seed, dtype=torch.float32)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter += torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)) * 0.2
    return decoder.bfloat16()


@pytest.fixture(params=["llama", "qwen2", "qwen3"])
def config(request, tiny_config):
    """Sizes that oneDNN blocks unevenly."""
    config = dataclasses.replace(tiny_config, family=request.param, hidden_size=72, head_dim=24, intermediate_size=80)
    if not can_pack(random_decoder(config, seed=0, dtype=torch.bfloat16)):
        pytest.skip("this CPU has no bfloat16 kernels in oneDNN")
    return dataclasses.replace(config, tie_word_embeddings=request.param != "qwen2")


@pytest.mark.parametrize("num_tokens", [1, 4, 33])
@pytest.mark.parametrize("layout", ["oneDNN", "panels"])
def test_packed_equals_plain(config, num_tokens, layout, monkeypatch):
    if layout == "oneDNN":
        monkeypatch.setattr(packed_module, "can_pack_panels", lambda weight: False)
        if not can_pack(bfloat16_decoder(config, 1)):
            pytest.skip("oneDNN has no bfloat16 kernels for this CPU")
    elif native.library() is None:
        pytest.skip("the C kernels do not run on this machine")
    plain, packed = bfloat16_decoder(config, 1), bfloat16_decoder(config, 1)
    pack_linears(packed)
    found, wanted = logits(packed, num_tokens), logits(plain, num_tokens)
    if layout == "oneDNN" or not torch.cpu._is_amx_tile_supported():
        assert torch.equal(found, wanted)
    else:  # oneDNN sums in tiles there, panels of 72 and 80 inputs, no whole tiles, in registers: another order
        torch.testing.assert_close(found, wanted, rtol=2**-6, atol=2**-4)


def test_repack_equals_a_new_model(config):
    packed, other = bfloat16_decoder(config, 1), bfloat16_decoder(config, 2)
    weights = pack_linears(packed)
    before = logits(packed, 5)
    moved = weights.repack((name, p.detach().float()) for name, p in other.named_parameters())
    assert moved == (native.library() is None), "panels stay in the memory, and in the huge pages, that they have"
    pack_linears(other)
    assert torch.equal(logits(packed, 5), logits(other, 5))
    assert not torch.equal(logits(packed, 5), before)


def test_later_changes_of_the_source_do_not_show(config):
    packed, other = bfloat16_decoder(config, 1), bfloat16_decoder(config, 2)
    pack_linears(packed).repack(other.named_parameters())
    before = logits(packed, 5)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert torch.equal(logits(packed, 5), before)


@pytest.mark.parametrize("name", ["layers.0.qkv_proj.scale", "layers.9.qkv_proj.weight", "layers.0.o_proj.bias"])
def test_weights_that_do_not_fit_are_refused(config, name):
    with pytest.raises(ModelError, match=f"weight {name} of shape"):
        pack_linears(bfloat16_decoder(config, 1)).repack([(name, torch.zeros(3))])


def test_float32_is_refused(tiny_decoder):
    assert not can_pack(tiny_decoder)
    with pytest.raises(ValueError, match=r"weights in torch.float32 on cpu cannot be packed"):
        pack_linears(tiny_decoder)
