"""The servers' own way from a tensor's name to a parameter, replayed on an exported file: all used, none missing.

The parameters are those that the server's drafter builds from config.json.  A name that matches no parameter is dropped
by SGLang without a word, and raises in vLLM.
"""

import json

import pytest
import torch
from safetensors.torch import load_file

from tlt_core.drafter.eagle3.files import load_eagle3, save_eagle3
from tlt_core.drafter.eagle3.model import Eagle3Config, random_eagle3

FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
FUSED |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
SERVERS = {  # by server: module of the one layer, and prefixes that are renamed
    "sglang 0.5.3": ("midlayer", {}),
    "sglang 0.5.23": ("midlayer", {"layers.0.": "midlayer."}),
    "vllm 0.32": ("layers.0", {"midlayer.": "layers.0."}),
}
APART = {"d2t", "t2d"}  # no parameters: all servers make the map from d2t alone


def parameters(raw: dict, layer: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of what the server's drafter has, but for the target's embedding; fused ones as they lie."""
    hidden, inner, d = raw["hidden_size"], raw["intermediate_size"], raw["head_dim"]
    heads, kv = raw["num_attention_heads"] * d, raw["num_key_value_heads"] * d
    return {
        "model.fc.weight": (hidden, 3 * hidden),
        f"model.{layer}.self_attn.qkv_proj.weight": (heads + 2 * kv, 2 * hidden),
        f"model.{layer}.self_attn.o_proj.weight": (hidden, heads),
        f"model.{layer}.mlp.gate_up_proj.weight": (2 * inner, hidden),
        f"model.{layer}.mlp.down_proj.weight": (hidden, inner),
        f"model.{layer}.input_layernorm.weight": (hidden,),
        f"model.{layer}.hidden_norm.weight": (hidden,),
        f"model.{layer}.post_attention_layernorm.weight": (hidden,),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (raw["draft_vocab_size"], hidden),
    }


def shapes(tensors: dict[str, torch.Tensor], renamed: dict[str, str]) -> dict[str, tuple[int, ...]]:
    """Shapes by the server's names; the rows of parts of a fused parameter are added up."""
    found: dict[str, tuple[int, ...]] = {}
    for name, value in tensors.items():
        for old, new in renamed.items():
            name = new + name.removeprefix(old) if name.startswith(old) else name
        path = [FUSED.get(part, part) for part in name.split(".")]
        parameter = name if name == "lm_head.weight" else ".".join(["model", *path])
        rows = found.get(parameter, (0,))[0] + len(value)
        found[parameter] = (rows, *value.shape[1:])
    return found


@pytest.fixture(params=["exported", "whole vocabulary"])
def drafter(request, tiny_config, tmp_path):
    """A folder by `tlt export`, and one whose draft vocabulary is the target's."""
    if request.param == "exported":
        return request.getfixturevalue("exported") / "drafter-eagle3"
    ids_J = torch.arange(tiny_config.vocab_size)
    whole = random_eagle3(Eagle3Config.for_target(tiny_config, len(ids_J)), ids_J, seed=0)
    save_eagle3(whole, tmp_path / "whole-eagle3", dtype=torch.bfloat16)
    return tmp_path / "whole-eagle3"


@pytest.mark.parametrize("server", SERVERS)
def test_every_tensor_is_used_and_none_is_missing(drafter, server, tiny_config):
    raw, tensors = json.loads((drafter / "config.json").read_text()), load_file(drafter / "model.safetensors")
    layer, renamed = SERVERS[server]
    weights = {name: value for name, value in tensors.items() if name not in APART}
    assert shapes(weights, renamed) == parameters(raw, layer)
    reduced = raw["draft_vocab_size"] < raw["vocab_size"]
    assert tensors.keys() & APART == (APART if reduced else set())
    if reduced:
        ids_J = torch.arange(len(tensors["d2t"])) + tensors["d2t"]  # both servers' reading of it
        assert torch.equal(ids_J, load_eagle3(drafter, tiny_config).draft_ids_J)
