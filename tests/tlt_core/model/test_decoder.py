"""The decoder computes what transformers computes, in float32, for every supported family."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from kernels.attention.packed_attention import packed_causal_attention
from tlt_core.model.decoder import rope_frequencies
from tlt_core.model.load import load_decoder, load_tokenizer, random_decoder

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,  # logits of a few units: differences show
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "llama_untied": (LlamaForCausalLM, LlamaConfig(**SIZES, tie_word_embeddings=False, rms_norm_eps=1e-5)),
    "llama3_rope": (LlamaForCausalLM, LlamaConfig(**SIZES, rope_parameters=LLAMA3)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SIZES, tie_word_embeddings=False)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True)),
}


def packed(offsets):
    return lambda layer, q, k, v: packed_causal_attention(q, k, v, torch.tensor(offsets))


@pytest.fixture(scope="module", params=MODELS)
def pair(request, tmp_path_factory):
    """The same random model as transformers' and as ours."""
    cls, config = MODELS[request.param]
    torch.manual_seed(1)
    theirs = cls(config).eval()
    with torch.no_grad():  # biases and norm weights start at 0 and 1: a dropped one would not show
        for name, parameter in theirs.named_parameters():
            if name.endswith(("norm.weight", "layernorm.weight", "bias")):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    folder = tmp_path_factory.mktemp(request.param)
    theirs.save_pretrained(folder)
    return theirs, load_decoder(folder, dtype=torch.float32)


@torch.no_grad()
def test_logits_equal_transformers(pair):
    """Logits of up to 8 units over 200 positions: max abs difference below 5e-5 (measured: 5e-6 to 1.3e-5)."""
    theirs, ours = pair
    tokens = torch.randint(0, 64, (200,), generator=torch.Generator().manual_seed(2))
    expected = theirs(tokens[None]).logits[0]
    assert expected.abs().max() > 2
    logits = ours.logits(ours(tokens, torch.arange(200), packed([0, 200])).last_TD)
    torch.testing.assert_close(logits, expected, atol=5e-5, rtol=0)


@torch.no_grad()
def test_taps_equal_output_hidden_states(pair):
    """Tap k is transformers' hidden_states[k]; the last one of theirs is after the final norm, as our last_TD is."""
    theirs, ours = pair
    tokens = torch.randint(0, 64, (30,), generator=torch.Generator().manual_seed(3))
    states = [s[0] for s in theirs.model(tokens[None], output_hidden_states=True).hidden_states]
    hidden = ours(tokens, torch.arange(30), packed([0, 30]), taps=(1, 0, 2))
    first, second, third = hidden.taps_TE.chunk(3, dim=-1)
    torch.testing.assert_close(first, states[1], atol=2e-5, rtol=0)
    assert torch.equal(second, states[0])
    torch.testing.assert_close(hidden.last_TD, states[2], atol=2e-5, rtol=0)
    torch.testing.assert_close(theirs.model.norm(third), states[2], atol=2e-5, rtol=0)
    assert ours(tokens, torch.arange(30), packed([0, 30])).taps_TE is None


@torch.no_grad()
def test_logits_of_the_embedded_model_equal_transformers(embedded_model):
    """SmolLM2-135M over a chat prompt, logits of up to 39 units: max abs difference below 5e-4 (measured: 7e-5)."""
    theirs = AutoModelForCausalLM.from_pretrained(embedded_model, dtype=torch.float32)
    ours = load_decoder(embedded_model, dtype=torch.float32)
    chat = [{"role": "user", "content": "State the final answer: 12 + 7 - 5 + 31 - 8 = ?"}]
    text = load_tokenizer(embedded_model).apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    tokens = load_tokenizer(embedded_model)(text, return_tensors="pt").input_ids[0]
    expected = theirs(tokens[None]).logits[0]
    logits = ours.logits(ours(tokens, torch.arange(len(tokens)), packed([0, len(tokens)])).last_TD)
    torch.testing.assert_close(logits, expected, atol=5e-4, rtol=0)


def test_casting_keeps_rotary_frequencies_exact(tiny_config):
    """In bfloat16 the frequency 0.1 would be off by 0.1 %: a quarter turn at position 2,000."""
    decoder = random_decoder(tiny_config, seed=0, dtype=torch.bfloat16)
    assert torch.equal(decoder.half().bfloat16()._frequencies, rope_frequencies(tiny_config))


def test_load_weights_overwrites_in_place(tiny_decoder, tiny_config):
    other = random_decoder(tiny_config, seed=1, dtype=torch.float32)
    before = tiny_decoder.layers[0].qkv_proj.weight
    tiny_decoder.load_weights(other.named_parameters())
    assert tiny_decoder.layers[0].qkv_proj.weight is before
    assert all(torch.equal(a, b) for a, b in zip(tiny_decoder.parameters(), other.parameters(), strict=True))
    with pytest.raises(ValueError, match=r"weight norm.bias of shape"):
        tiny_decoder.load_weights([("norm.bias", torch.zeros(32))])
    with pytest.raises(ValueError, match=r"weight norm.weight of shape \(31,\)"):
        tiny_decoder.load_weights([("norm.weight", torch.zeros(31))])
