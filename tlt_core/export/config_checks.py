"""The EAGLE-3 layout that vLLM (0.32) and SGLang (0.5.3, 0.5.23) load unchanged: what `config.json` must say.

Written from the layout's description, apart from the code that writes it (`drafter/eagle3_files.py`).  Each check
returns what it found in a few words, or raises Refused with what the servers would do with it and the remedy.
"""

from typing import Any

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
_ABSENT = ("bias", "mlp_bias", "fc_norm", "norm_output", "norm_before_fc", "quantization_config")  # not in all servers
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


def check_config(raw: Any) -> str:
    """Keys that both servers need, in the values that both implement.  Raises Refused."""
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
    """The second route says what the first says."""
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
    """Does the drafter fit this target's shapes?  Raises Refused."""
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
