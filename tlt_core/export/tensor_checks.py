"""The same layout's tensors: names, shapes, dtypes, values, and the draft vocabulary's two maps.

`raw` is a configuration that `config_checks.check_config` has passed.

Shapes: V target vocabulary, J draft vocabulary.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from tlt_core.export.contents import Refused

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


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
    """Names, shapes and dtypes.  Raises Refused."""
    wanted = _shapes(raw)
    if "lm_head.weight" not in tensors and raw["draft_vocab_size"] < raw["vocab_size"]:
        raise Refused(
            f"lm_head.weight is missing, though the draft vocabulary ({raw['draft_vocab_size']}) is not the target's "
            f"({raw['vocab_size']}): vLLM would take the target's head without a word and draft garbage; export again"
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
