"""The EAGLE-3 layout that vLLM (0.32) and SGLang (0.5.3, 0.5.23) load unchanged: `config.json` and the tensors.

Written from the layout's description, independently of the code that writes it (`drafter/eagle3/files.py`).  Each check
returns what it found in a few words, or raises Refused, which says what the servers would do and the remedy.

Shapes: V target vocabulary, J draft vocabulary.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from tlt_core.export.contents import Refused
from tlt_core.model.config import DecoderConfig

_TAPS = "eagle_aux_hidden_state_layer_ids"
_FIXED = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "norm_before_residual": False,
    "attention_bias": False,
}
# Not implemented by every server:
_ABSENT = ("bias", "mlp_bias", "fc_norm", "norm_output", "norm_before_fc", "quantization_config")
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "draft_vocab_size",
    "max_position_embeddings",
)
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def check_config(raw: Any) -> str:
    """Keys that both servers need, with values that both implement.  Raises Refused."""
    if not isinstance(raw, dict):
        raise Refused(f"config.json must hold a JSON object, found {type(raw).__name__}; export again")
    for key, wanted in _FIXED.items():
        if key not in raw or raw[key] != wanted:
            found = repr(raw[key]) if key in raw else "missing"
            raise Refused(f"{key} is {found}, the servers need {wanted!r} for this layout; export again")
    for key in _ABSENT:
        if raw.get(key):
            raise Refused(f"{key}={raw[key]!r} is not what every server implements; export a drafter without it")
    for key in _SIZES:
        if not isinstance(raw.get(key), int) or raw[key] < 1:
            raise Refused(f"{key} is {raw.get(key)!r}, a positive number is needed; export again")
    if raw["draft_vocab_size"] > raw["vocab_size"]:
        raise Refused(
            f"draft_vocab_size {raw['draft_vocab_size']} exceeds vocab_size {raw['vocab_size']}; export again"
        )
    rope = raw.get("rope_parameters") or {}
    if raw.get("rope_theta") is None or rope.get("rope_theta") != raw["rope_theta"]:
        raise Refused(
            f"rope_theta is {raw.get('rope_theta')!r}, in rope_parameters {rope.get('rope_theta')!r}; servers read one "
            "or the other, so both are needed and must agree: export again"
        )
    _check_speculators(raw)
    return f"EAGLE-3 llama and speculators keys, one layer, draft vocabulary {raw['draft_vocab_size']}"


def _check_speculators(raw: dict[str, Any]) -> None:
    """vLLM's speculators route must describe the same drafter as the top level.  Raises Refused."""
    if raw.get("speculators_model_type") != "eagle3":
        raise Refused("the speculators keys are missing, so 'vllm serve' of this folder alone fails; export again")
    layer = raw.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise Refused("transformer_layer_config is missing; 'vllm serve' of this folder alone fails: export again")
    needed = {*_SIZES, *_FIXED, "rope_theta", "rope_parameters"} - {"draft_vocab_size", "architectures"}
    for key in sorted(needed | layer.keys()):
        if layer.get(key) != raw.get(key):
            raise Refused(
                f"transformer_layer_config has {key}={layer.get(key)!r}, the top level {raw.get(key)!r}: vLLM would "
                "build another layer on its speculators route; export again"
            )
    try:
        config = raw["speculators_config"]
        depth, verifier = config["proposal_methods"][0]["speculative_tokens"], config["verifier"]["name_or_path"]
    except (KeyError, IndexError, TypeError) as error:
        raise Refused(f"speculators_config is incomplete ({error!r}); export again") from None
    if not isinstance(depth, int) or depth < 1 or not isinstance(verifier, str) or not verifier:
        raise Refused(f"speculators_config has speculative_tokens={depth!r}, verifier {verifier!r}; export again")


def check_taps(raw: dict[str, Any], num_layers: int) -> str:
    """Layer ids in vLLM's meaning (top level) and SGLang's (inside eagle_config, one less).  Raises Refused.

    num_layers: of the target.
    """
    top, eagle = raw.get(_TAPS), raw.get("eagle_config") or {}
    nested = eagle.get(_TAPS) if isinstance(eagle, dict) else None
    if not isinstance(top, list) or not isinstance(nested, list) or not all(type(x) is int for x in top + nested):
        raise Refused(f"{_TAPS} must be a list of numbers at the top level and inside eagle_config; export again")
    if [x + 1 for x in nested] != top:
        raise Refused(
            f"{_TAPS} is {top} at the top level (vLLM: streams entering these layers) and {nested} inside eagle_config "
            "(SGLang: outputs of these layers), which name different states: "
            f"the second must be {[x - 1 for x in top]}.  "
            "One of the servers would draft from the wrong states; export again"
        )
    if len(top) != 3 or sorted(set(top)) != top or not 0 <= top[0] <= top[-1] <= num_layers:
        raise Refused(
            f"{_TAPS} {top} are not three ascending layers of a target with {num_layers}; give the target that the "
            "drafter was trained for"
        )
    if eagle.get("use_aux_hidden_state") is not True:
        raise Refused(
            "eagle_config.use_aux_hidden_state is not true: vLLM would not use the tapped states; export again"
        )
    return f"{top} for vLLM, {nested} for SGLang, the same states"


def check_sizes(raw: dict[str, Any], target: DecoderConfig) -> str:
    """Whether the drafter fits this target's shapes.  Raises Refused."""
    for key, found, wanted in (
        ("hidden size", raw["hidden_size"], target.hidden_size),
        ("target_hidden_size", raw.get("target_hidden_size", target.hidden_size), target.hidden_size),
        ("vocabulary", raw["vocab_size"], target.vocab_size),
    ):
        if found != wanted:
            raise Refused(
                f"the drafter's {key} is {found}, the target's {wanted}: it was made for another target; give that "
                "one, or train a drafter for this one with 'tlt warmup'"
            )
    return f"hidden size {target.hidden_size}, vocabulary {target.vocab_size}, {target.num_layers} layers"


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """The folder's one weight file.  Raises Refused when it is damaged, or no safetensors file at all."""
    path = folder / "model.safetensors"
    others = sorted(x.name for x in folder.glob("*.safetensors") if x != path)
    if not path.is_file() or others or (folder / "model.safetensors.index.json").exists():
        found = f"{others[0]} is there" if others else "model.safetensors is missing, or an index is there"
        raise Refused(f"weights must lie in model.safetensors alone, but {found}; export again")
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise Refused(
            f"model.safetensors is truncated, damaged or no safetensors file ({error}); copy the folder again"
        ) from None


def check_tensors(tensors: dict[str, Tensor], raw: dict[str, Any]) -> str:
    """Names, shapes and dtypes.  raw: passed by `check_config`.  Raises Refused."""
    wanted = _shapes(raw)
    if "lm_head.weight" not in tensors and raw["draft_vocab_size"] < raw["vocab_size"]:
        raise Refused(
            f"lm_head.weight is missing, though the draft vocabulary ({raw['draft_vocab_size']}) is not the target's "
            f"({raw['vocab_size']}): vLLM would take the target's head and draft garbage, without a warning; export "
            "again"
        )
    if missing := sorted(wanted.keys() - tensors.keys()):
        raise Refused(f"tensor {missing[0]} is missing: servers would leave it random; export again")
    if unknown := sorted(tensors.keys() - wanted.keys()):
        raise Refused(f"tensor {unknown[0]} is not part of the layout: servers drop it silently; export without it")
    for name, shape in wanted.items():
        if tuple(tensors[name].shape) != shape:
            raise Refused(f"{name} has shape {tuple(tensors[name].shape)}, config.json implies {shape}; export again")
    floats = {name: x.dtype for name, x in tensors.items() if name.endswith(".weight")}
    if len(set(floats.values())) > 1 or not set(floats.values()) <= set(_FLOATS):
        found = sorted({str(x) for x in floats.values()})
        raise Refused(f"weights are {', '.join(found)}; one of bfloat16, float16, float32 is needed: export again")
    for name, dtype in (("d2t", torch.int64), ("t2d", torch.bool)):
        if name in tensors and tensors[name].dtype != dtype:
            raise Refused(f"{name} is {tensors[name].dtype}, the servers need {dtype}; export again")
    return f"{len(tensors)} tensors, {next(iter(floats.values()))}, as the layout names them"


def _shapes(raw: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner = raw["hidden_size"], raw["intermediate_size"]
    queries = raw["num_attention_heads"] * raw["head_dim"]
    keys = raw["num_key_value_heads"] * raw["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, 3 * raw.get("target_hidden_size", hidden)),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.self_attn.q_proj.weight": (queries, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (keys, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (keys, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, queries),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "midlayer.mlp.gate_proj.weight": (inner, hidden),
        "midlayer.mlp.up_proj.weight": (inner, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, inner),
        "norm.weight": (hidden,),
        "lm_head.weight": (raw["draft_vocab_size"], hidden),
    }
    if raw["draft_vocab_size"] < raw["vocab_size"]:  # a whole vocabulary has no map: vLLM refuses one
        shapes |= {"d2t": (raw["draft_vocab_size"],), "t2d": (raw["vocab_size"],)}
    return shapes


def check_values(tensors: dict[str, Tensor]) -> str:
    """Finite numbers, and no tensor of zeros alone.  Raises Refused."""
    for name, value in tensors.items():
        if value.is_floating_point() and not bool(value.isfinite().all()):
            bad = int((~value.isfinite()).sum())
            raise Refused(f"{name} holds {bad} values that are NaN or infinite; train again from a sound drafter")
        if name in ("fc.weight", "lm_head.weight") and not bool(value.any()):
            raise Refused(f"{name} is all zeros; it was never written: export again")
    return f"{sum(x.numel() for x in tensors.values()):,} finite numbers"


def check_vocabulary(tensors: dict[str, Tensor], raw: dict[str, Any]) -> str:
    """d2t as offsets of ascending target ids, t2d the same set.  Raises Refused."""
    size, vocab = raw["draft_vocab_size"], raw["vocab_size"]
    if size == vocab:
        return "the target's own, no map needed"
    ids_J = draft_ids(tensors, raw)
    first, last = int(ids_J.min()), int(ids_J.max())
    if first < 0 or last >= vocab:
        raise Refused(
            f"d2t maps to token ids {first} .. {last}, the target has 0 .. {vocab - 1}; it must hold offsets, target "
            "id minus draft id: export again"
        )
    if not bool((ids_J.diff() > 0).all()):
        at = int((ids_J.diff() <= 0).nonzero()[0])
        raise Refused(
            f"d2t is swapped or no list of offsets: draft token {at} is target {int(ids_J[at])}, the next one "
            f"{int(ids_J[at + 1])}, but they ascend in every drafter of this layout; export again"
        )
    known_V = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids_J, True)
    if not torch.equal(known_V, tensors["t2d"]):
        odd = int((known_V != tensors["t2d"]).nonzero()[0])
        raise Refused(
            f"d2t and t2d name different tokens (first: {odd}); one of them is shifted or of another drafter, and "
            "every draft would be a wrong token: export again"
        )
    return f"{size} of {vocab} tokens, d2t and t2d agree"


def draft_ids(tensors: dict[str, Tensor], raw: dict[str, Any]) -> Tensor:
    """Target ids of the draft vocabulary, [J]."""
    ids_J = torch.arange(raw["draft_vocab_size"])
    return ids_J + tensors["d2t"] if "d2t" in tensors else ids_J
