"""Reading and writing config.json."""

import dataclasses

import pytest

from tlt_core.model.config import DecoderConfig, ModelError, RopeScaling

LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


SCALING = RopeScaling(8.0, 1.0, 4.0, 64)
LLAMA3 = {"rope_type": "llama3"} | dataclasses.asdict(SCALING)


def test_defaults_of_an_old_llama_config():
    config = DecoderConfig.from_hf(LLAMA | {"rope_theta": 5e5, "eos_token_id": [7, 2]})
    assert (config.num_kv_heads, config.head_dim, config.rope_theta) == (4, 8, 5e5)
    assert (config.eos_token_ids, config.tie_word_embeddings, config.rope_scaling) == ((7, 2), False, None)


def test_rope_scaling_in_both_spellings():
    old = DecoderConfig.from_hf(LLAMA | {"rope_theta": 5e5, "rope_scaling": LLAMA3})
    new = DecoderConfig.from_hf(LLAMA | {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}})
    assert old == new
    assert old.rope_scaling == SCALING


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("scaling", [None, SCALING])
def test_round_trip(tiny_config, family, scaling):
    config = dataclasses.replace(tiny_config, family=family, rope_scaling=scaling, eos_token_ids=(2, 5))
    assert DecoderConfig.from_hf(config.to_hf()) == config


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"model_type": "mixtral"}, "'mixtral' is not supported; supported are llama, qwen2, qwen3"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported for llama"),
        ({"attention_bias": True}, "attention_bias=True is not supported for llama"),
        ({"model_type": "qwen3", "use_sliding_window": True}, "use_sliding_window=True is not supported for qwen3"),
        ({"model_type": "qwen2", "layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config="),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic' is not supported"),
    ],
)
def test_what_would_compute_something_else_is_refused(extra, message):
    with pytest.raises(ModelError, match=message):
        DecoderConfig.from_hf(LLAMA | extra)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"model_type": ["llama"]}, r"model_type \['llama'\] is not supported"),
        ({"layer_types": 3, "hidden_size": True}, "hidden_size is True, which is no positive whole number"),
        ({"rms_norm_eps": []}, r"rms_norm_eps is \[\], which is no number"),
        ({"rms_norm_eps": 2}, r"rms_norm_eps is 2; numbers from 1e-20 to 1 make sense"),
        ({"rope_theta": "abc"}, "rope_theta is 'abc', which is no number"),
        ({"rope_theta": 10**400}, "rope_theta is 1000"),
        ({"rope_parameters": {"rope_theta": float("nan")}}, "rope_theta is nan; numbers from 1 to 1e"),
        ({"rope_scaling": LLAMA3 | {"factor": 0}}, "factor is 0; numbers from 0.001"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": None}}, "rope_type llama3 lacks the key 'low_freq_factor'"),
        ({"head_dim": 7}, "4 heads of size 7 on 4 key/value heads are no attention"),
        ({"num_key_value_heads": 3}, "4 heads of size 8 on 3 key/value heads are no attention"),
    ],
)
def test_values_that_nothing_can_be_computed_with_are_refused(extra, message):
    with pytest.raises(ModelError, match=message):
        DecoderConfig.from_hf(LLAMA | extra)
