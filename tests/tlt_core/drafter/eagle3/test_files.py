"""The checkpoint layout: what is written, that it comes back to the bit, and what is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tlt_core.drafter.eagle3.files import check_eagle3, export_weights, load_eagle3, save_eagle3
from tlt_core.drafter.eagle3.model import (
    Eagle3Config,
    choose_draft_vocabulary,
    default_taps,
    random_eagle3,
    tap_scales,
)
from tlt_core.model.config import ModelError

IDS = torch.tensor([0, 2, 3, 7, 8, 20, 41, 63])


def tiny_model(tiny_config, ids=IDS):
    model = random_eagle3(Eagle3Config.for_target(tiny_config, len(ids)), ids, seed=3)
    model.tap_scales = (1.0, 0.25, 0.0078125)
    return model


def test_layout(tiny_config, tmp_path):
    model = tiny_model(tiny_config)
    save_eagle3(model, tmp_path / "d-eagle3", dtype=torch.float32)
    tensors = load_file(tmp_path / "d-eagle3" / "model.safetensors")
    hidden, heads, kv, inner = 32, 4 * 8, 2 * 8, 48
    assert {name: tuple(x.shape) for name, x in tensors.items()} == {
        "fc.weight": (hidden, 3 * hidden),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.self_attn.q_proj.weight": (heads, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (kv, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, heads),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "midlayer.mlp.gate_proj.weight": (inner, hidden),
        "midlayer.mlp.up_proj.weight": (inner, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, inner),
        "norm.weight": (hidden,),
        "lm_head.weight": (8, hidden),
        "d2t": (8,),
        "t2d": (64,),
    }
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["d2t"].tolist() == [0, 1, 1, 4, 4, 15, 35, 56]
    assert tensors["t2d"].dtype == torch.bool
    assert tensors["t2d"].nonzero().squeeze(1).tolist() == IDS.tolist()
    assert torch.equal(tensors["fc.weight"][:, 32:64], model.fc.weight[:, 32:64] * 0.25)
    raw = json.loads((tmp_path / "d-eagle3" / "config.json").read_text())
    wanted = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "vocab_size": 64,
        "draft_vocab_size": 8,
        "tie_word_embeddings": False,
        "norm_before_residual": False,
        "attention_bias": False,
        "rope_theta": 10000.0,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [-1, 0, 1]},
        "dtype": "float32",
        "torch_dtype": "float32",
    }
    assert {key: raw[key] for key in wanted} == wanted
    assert raw["rope_parameters"] == {"rope_theta": 10000.0, "rope_type": "default"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ids", [IDS, torch.arange(64)], ids=["reduced", "whole"])
def test_round_trip_is_bitwise(tiny_config, tmp_path, dtype, ids):
    model = tiny_model(tiny_config, ids).to(dtype)
    save_eagle3(model, tmp_path / "a", dtype=dtype)
    loaded = load_eagle3(tmp_path / "a", tiny_config)
    assert loaded.config == model.config
    assert loaded.tap_scales == model.tap_scales
    assert loaded.draft_ids_J.tolist() == ids.tolist()
    for (name, a), (_, b) in zip(model.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(a.float(), b), name
    save_eagle3(loaded, tmp_path / "b", dtype=dtype)
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()
    assert ("d2t" in export_weights(model)) == (len(ids) < 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_folding_changes_no_bit_of_fc(tiny_config, dtype):
    model = tiny_model(tiny_config).to(dtype)
    taps = torch.randn(5, 96, generator=torch.Generator().manual_seed(0)).mul(300).to(dtype)
    with torch.no_grad():
        expected = model.fuse(taps)
        assert torch.equal(torch.nn.functional.linear(taps, export_weights(model)["fc.weight"]), expected)
        assert not torch.equal(model.fc(taps), expected)


def test_foreign_spellings(tiny_config, tmp_path):
    """layers.0 for midlayer, a stored embedding, layer ids in SGLang's place only."""
    save_eagle3(tiny_model(tiny_config), tmp_path, dtype=torch.float32)
    expected = load_eagle3(tmp_path, tiny_config)
    tensors = {n.replace("midlayer", "layers.0"): x for n, x in load_file(tmp_path / "model.safetensors").items()}
    save_file(tensors | {"embed_tokens.weight": torch.zeros(64, 32)}, tmp_path / "model.safetensors")
    raw = json.loads((tmp_path / "config.json").read_text())
    del raw["eagle_aux_hidden_state_layer_ids"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    loaded = load_eagle3(tmp_path, tiny_config)
    assert loaded.config.taps == (0, 1, 2)
    assert torch.equal(loaded.qkv_proj.weight, expected.qkv_proj.weight)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 65}, "vocab_size is 65, but the target's is 64"),
        ({"hidden_size": 16}, "hidden_size is 16, but the target's is 32"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 15, 27]}, r"between 0 and 2 of this target, got \(2, 15, 27\)"),
        ({"num_hidden_layers": 2}, "num_hidden_layers=2"),
        ({"fc_norm": True}, "fc_norm=True"),
        ({"draft_vocab_size": 9}, r"d2t has shape|lm_head.weight has shape \(8, 32\)"),
        ({"draft_vocab_size": 65}, "draft_vocab_size 65 is larger"),
        ({"intermediate_size": 40}, r"gate_proj.weight has shape \(48, 32\)"),
        ({"model_type": "gpt2"}, "model_type 'gpt2'"),
        ({"tap_scales": [1, 0, 1]}, "must be 3 positive numbers"),
        ({"tap_scales": "abc"}, "config.json has a malformed value"),
        ({"num_attention_heads": 0, "head_dim": None}, "num_attention_heads is 0"),
        ({"eagle_aux_hidden_state_layer_ids": "abc"}, "eagle_aux_hidden_state_layer_ids are no list"),
    ],
)
def test_a_configuration_that_does_not_fit(tiny_config, tmp_path, change, message):
    save_eagle3(tiny_model(tiny_config), tmp_path, dtype=torch.float32)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | change))
    with pytest.raises(ModelError, match=message) as error:
        load_eagle3(tmp_path, tiny_config)
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lm_head.weight": None}, "lm_head.weight is missing"),
        ({"d2t": None}, "d2t is missing"),
        ({"d2t": IDS - torch.arange(8) + 1}, "must hold offsets"),
        ({"t2d": torch.zeros(64, dtype=torch.bool)}, "t2d and d2t name different tokens"),
        ({"fc.bias": torch.zeros(32)}, "fc.bias is not part"),
        ({"midlayer.self_attn.k_proj.weight": torch.zeros(16, 32)}, r"k_proj.weight has shape \(16, 32\)"),
        ({"norm.weight": torch.ones(32, dtype=torch.complex64)}, "norm.weight is stored as C64, but only F64, F32"),
        ({"t2d": torch.ones(64).to(torch.float8_e4m3fn)}, "t2d is stored as F8_E4M3, but only BOOL"),
        ({"d2t": torch.tensor([0] * 7 + [2**63 - 7])}, "must hold offsets"),  # the sum and the difference wrap round
    ],
)
def test_tensors_that_do_not_fit(tiny_config, tmp_path, change, message):
    save_eagle3(tiny_model(tiny_config), tmp_path, dtype=torch.float32)
    tensors = load_file(tmp_path / "model.safetensors") | change
    save_file({n: x for n, x in tensors.items() if x is not None}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        load_eagle3(tmp_path, tiny_config)


def test_weights_that_are_not_finite_are_neither_written_nor_read(tiny_config, tmp_path):
    model = tiny_model(tiny_config)
    save_eagle3(model, tmp_path / "a", dtype=torch.float32)
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    tensors["midlayer.mlp.down_proj.weight"][3, 4] = torch.inf
    save_file(tensors, tmp_path / "a" / "model.safetensors")
    with pytest.raises(ModelError, match=r"a: midlayer\.mlp\.down_proj\.weight holds NaN or infinite numbers; make"):
        load_eagle3(tmp_path / "a", tiny_config)
    with torch.no_grad():
        model.qkv_proj.weight[-1, 0] = torch.nan
    with pytest.raises(ModelError, match=r"midlayer\.self_attn\.v_proj\.weight holds NaN .*; it is not written"):
        save_eagle3(model, tmp_path / "b", dtype=torch.float32)
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_folder_that_is_none(tiny_config, tmp_path):
    with pytest.raises(ModelError, match="not a readable drafter folder"):
        load_eagle3(tmp_path, tiny_config)
    save_eagle3(tiny_model(tiny_config), tmp_path, dtype=torch.float32)
    (tmp_path / "model.safetensors").write_bytes(b"x")
    with pytest.raises(ModelError, match="not a readable drafter folder"):
        load_eagle3(tmp_path, tiny_config)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ModelError, match=r"config\.json must hold a JSON object"):
        check_eagle3(tmp_path, tiny_config)


def test_a_check_takes_no_memory_for_the_weights(tiny_config, tmp_path):
    """A config.json that names a quarter of a terabyte."""
    save_eagle3(tiny_model(tiny_config), tmp_path, dtype=torch.float32)
    raw = json.loads((tmp_path / "config.json").read_text())
    wide = 2**31
    (tmp_path / "config.json").write_text(json.dumps(raw | {"intermediate_size": wide}))
    with pytest.raises(ModelError, match=rf"gate_proj.weight has shape \(48, 32\), .* implies \({wide}, 32\)"):
        check_eagle3(tmp_path, tiny_config)


def test_default_taps(tiny_config):
    assert default_taps(30) == (2, 15, 27)
    assert default_taps(7) == (2, 3, 4)
    assert default_taps(2) == (0, 1, 2)
    with pytest.raises(ModelError, match=r"between 0 and 2 .* got \(0, 2\)"):
        Eagle3Config.for_target(tiny_config, 8, taps=(0, 2))


def test_draft_vocabulary():
    counts = torch.tensor([5, 0, 9, 1, 1, 0, 7, 1])
    assert choose_draft_vocabulary(counts, 4, always=[5]).tolist() == [0, 2, 5, 6]
    assert choose_draft_vocabulary(counts, 4, always=[]).tolist() == [0, 2, 3, 6]  # of equals the lower id
    assert choose_draft_vocabulary(counts, 8, always=[1]).tolist() == list(range(8))
    asked = torch.tensor([0, 0, 0, 0, 3, 900, 0, 9])  # breaks ties, and no more
    assert choose_draft_vocabulary(counts, 4, always=[], prompt_counts_V=asked).tolist() == [0, 2, 6, 7]
    assert choose_draft_vocabulary(counts, 7, always=[], prompt_counts_V=asked).tolist() == [0, 2, 3, 4, 5, 6, 7]
    for size, always in ((9, []), (1, [1, 2])):
        with pytest.raises(ValueError, match="does not fit"):
            choose_draft_vocabulary(counts, size, always=always)


def test_scales_ignore_massive_tokens():
    taps = torch.cat([torch.full((9, 4), x) for x in (0.5, 8.0, 100.0)], dim=1)
    taps[0] = 25_000
    assert tap_scales(taps) == (2.0, 0.125, 2.0**-7)
