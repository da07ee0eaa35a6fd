"""The servers' own way from a tensor's name to a parameter, replayed on an exported file: all used, none missing.

Rules by server, in their order: names that are read apart, prefixes put before a name, parts renamed, parts that fill
a share of a fused parameter.  The parameters are those that the server's drafter builds from config.json.  A name that
matches no parameter is dropped by SGLang without a word, and raises in vLLM.
"""

import json
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from tlt_core.drafter.eagle3.files import load_eagle3, save_eagle3
from tlt_core.drafter.eagle3.model import Eagle3Config, random_eagle3

FUSED = {"q_proj": ("qkv_proj", "q"), "k_proj": ("qkv_proj", "k"), "v_proj": ("qkv_proj", "v")} | {
    "gate_proj": ("gate_up_proj", "0"),
    "up_proj": ("gate_up_proj", "1"),
}
SHARES = {"qkv_proj": {"q", "k", "v"}, "gate_up_proj": {"0", "1"}}


class Server(NamedTuple):
    """How one server reads a drafter's names."""

    layer: str  # module of the one layer
    renamed: dict[str, str]
    no_prefix: tuple[str, ...]  # names that do not go under `model.`
    apart: dict[str, str]  # read apart from the parameters
    ignored: tuple[str, ...]
    from_target: tuple[str, ...]  # parameters that the target provides


SERVERS = {
    "sglang 0.5.3": Server(
        layer="midlayer",
        renamed={},
        no_prefix=("lm_head.weight",),
        apart={"d2t": "hot_token_id"},
        ignored=("t2d",),
        from_target=("model.embed_tokens.weight",),
    ),
    "sglang 0.5.23": Server(
        layer="midlayer",
        renamed={"layers.0.": "midlayer."},
        no_prefix=("lm_head.weight",),
        apart={"d2t": "hot_token_id"},
        ignored=("t2d",),
        from_target=("model.embed_tokens.weight",),
    ),
    "vllm 0.32": Server(
        layer="layers.0",
        renamed={"midlayer.": "layers.0."},
        no_prefix=("lm_head.weight", "draft_id_to_target_id"),
        apart={"d2t": "draft_id_to_target_id"},
        ignored=("t2d",),
        from_target=("model.embed_tokens.weight",),
    ),
}


def parameters(raw: dict, server: Server) -> dict[str, tuple[int, ...]]:
    """Names and shapes of what the server's drafter has; fused ones as they lie in it."""
    hidden, inner, d = raw["hidden_size"], raw["intermediate_size"], raw["head_dim"]
    heads, kv = raw["num_attention_heads"] * d, raw["num_key_value_heads"] * d
    layer = f"model.{server.layer}"
    return {
        "model.embed_tokens.weight": (raw["vocab_size"], hidden),
        "model.fc.weight": (hidden, 3 * hidden),
        f"{layer}.self_attn.qkv_proj.weight": (heads + 2 * kv, 2 * hidden),
        f"{layer}.self_attn.o_proj.weight": (hidden, heads),
        f"{layer}.mlp.gate_up_proj.weight": (2 * inner, hidden),
        f"{layer}.mlp.down_proj.weight": (hidden, inner),
        f"{layer}.input_layernorm.weight": (hidden,),
        f"{layer}.hidden_norm.weight": (hidden,),
        f"{layer}.post_attention_layernorm.weight": (hidden,),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (raw["draft_vocab_size"], hidden),
    }


class Loaded(NamedTuple):
    """What became of a file's tensors."""

    rows: dict[str, int]  # of each parameter that was written, over all its parts
    parts: dict[str, set[str]]  # shares of fused parameters
    dropped: list[str]
    apart: dict[str, torch.Tensor]


def load(tensors: dict[str, torch.Tensor], raw: dict, server: Server) -> Loaded:
    known = parameters(raw, server)
    loaded = Loaded({}, {}, [], {})
    for name, value in tensors.items():
        if name in server.ignored:
            continue
        if name in server.apart:
            loaded.apart[server.apart[name]] = value
            continue
        for old, new in server.renamed.items():
            name = new + name.removeprefix(old) if name.startswith(old) else name
        path = name.split(".")
        share = None
        if len(path) > 1 and path[-2] in FUSED:
            path[-2], share = FUSED[path[-2]]
        parameter = ".".join(path) if name in server.no_prefix else ".".join(["model", *path])
        if parameter not in known or value.shape[1:] != known[parameter][1:]:
            loaded.dropped.append(name)
            continue
        loaded.rows[parameter] = loaded.rows.get(parameter, 0) + len(value)
        if share is not None:
            loaded.parts.setdefault(parameter.split(".")[-2], set()).add(share)
    return loaded


@pytest.fixture(params=["exported", "whole vocabulary"])
def drafter(request, tiny_config, tmp_path):
    """A folder by `tlt export`, and one whose draft vocabulary is the target's."""
    if request.param == "exported":
        return request.getfixturevalue("exported") / "drafter-eagle3"
    ids_J = torch.arange(tiny_config.vocab_size)
    save_eagle3(
        random_eagle3(Eagle3Config.for_target(tiny_config, len(ids_J)), ids_J, seed=0),
        tmp_path / "whole-eagle3",
        dtype=torch.bfloat16,
    )
    return tmp_path / "whole-eagle3"


@pytest.mark.parametrize("server", SERVERS.values(), ids=SERVERS)
def test_every_tensor_is_used_and_none_is_missing(drafter, server, tiny_config):
    raw, tensors = json.loads((drafter / "config.json").read_text()), load_file(drafter / "model.safetensors")
    loaded, known = load(tensors, raw, server), parameters(raw, server)
    assert not loaded.dropped
    assert loaded.rows.keys() | set(server.from_target) == known.keys()
    assert {name: rows for name, rows in loaded.rows.items()} == {name: known[name][0] for name in loaded.rows}
    assert loaded.parts == SHARES
    reduced = raw["draft_vocab_size"] < raw["vocab_size"]
    assert bool(loaded.apart) == ("t2d" in tensors) == reduced
    if reduced:
        (offsets_J,) = loaded.apart.values()
        ids_J = torch.arange(len(offsets_J)) + offsets_J  # both servers' reading of d2t
        assert torch.equal(ids_J, load_eagle3(drafter, tiny_config).draft_ids_J)
