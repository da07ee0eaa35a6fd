"""EAGLE-3 checkpoints in the one layout that vLLM (0.32) and SGLang (0.5.3 and 0.5.23) load unchanged.

    Eagle3Model -> export_weights -> model.safetensors + config.json -> load_eagle3 -> Eagle3Model

What the servers leave no choice about: tensors of the layer are called `midlayer.*`; `fc` has no bias; the target's
embedding is not stored, so each server shares its own; `d2t` holds offsets (target id = draft id + d2t[draft id]) and
exists only where the draft vocabulary is smaller than the target's; tapped layers are written in both meanings (top
level: the stream entering a layer, vLLM; inside `eagle_config`: the layer whose output it is, SGLang).

Shapes: V target vocabulary, J draft vocabulary.
"""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tlt_core.drafter.eagle3.model import Eagle3Config, Eagle3Model, blank_eagle3, check_taps, default_taps
from tlt_core.items.store import is_finite, write_folder_atomically
from tlt_core.model.config import DecoderConfig, ModelError

_ARCHITECTURE = "LlamaForCausalLMEagle3"
_NAMES = {  # ours -> the parts it is fused of
    "fc": ("fc",),
    "input_norm": ("midlayer.input_layernorm",),
    "hidden_norm": ("midlayer.hidden_norm",),
    "qkv_proj": tuple(f"midlayer.self_attn.{x}_proj" for x in "qkv"),
    "o_proj": ("midlayer.self_attn.o_proj",),
    "post_norm": ("midlayer.post_attention_layernorm",),
    "gate_up_proj": ("midlayer.mlp.gate_proj", "midlayer.mlp.up_proj"),
    "down_proj": ("midlayer.mlp.down_proj",),
    "norm": ("norm",),
    "lm_head": ("lm_head",),
}
_MAPS = {"d2t": ("I64", "I32"), "t2d": ("BOOL",)}  # between the draft vocabulary and the target's; stored as
_WEIGHTS = ("F64", "F32", "F16", "BF16")  # what weights may be stored as
_ONLY = {  # settings of which one value is implemented
    "num_hidden_layers": 1,
    "attention_bias": False,
    "mlp_bias": False,
    "bias": False,
    "norm_before_residual": False,
    "fc_norm": False,
    "norm_output": False,
    "norm_before_fc": False,
    "tie_word_embeddings": False,
    "quantization_config": None,
}


@torch.no_grad()
def export_weights(model: Eagle3Model) -> dict[str, Tensor]:
    """The tensors of the layout, scales folded into `fc`.  They may share the model's memory."""
    tensors: dict[str, Tensor] = {}
    for ours, parameter in model.named_parameters():
        module = ours.removesuffix(".weight")
        value = parameter.detach()
        if module == "fc":
            value = value * _columns(model, value)
        sizes = _part_sizes(model, module, len(value))
        tensors |= {f"{x}.weight": part for x, part in zip(_NAMES[module], value.split(sizes), strict=True)}
    ids_J, vocab = model.draft_ids_J, model.config.layer.vocab_size
    if len(ids_J) < vocab:
        tensors["d2t"] = ids_J - torch.arange(len(ids_J), device=ids_J.device)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool, device=ids_J.device).index_fill_(0, ids_J, True)
    return tensors


def import_weights(model: Eagle3Model, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The inverse of `export_weights`, by the names of `model` (parameters and draft_ids_J), fused and unfolded.

    Raises ModelError on what does not fit the model's configuration.
    """
    rest = {name.replace("layers.0.", "midlayer.", 1): value for name, value in tensors.items()}
    layer = model.config.layer
    sizes = {  # rows and columns; packed models have no parameters to read them from
        "fc": (layer.hidden_size, len(model.config.taps) * layer.hidden_size),
        "qkv_proj": (sum(model.heads) * model.head_dim, 2 * layer.hidden_size),
        "o_proj": (layer.hidden_size, layer.num_heads * model.head_dim),
        "gate_up_proj": (2 * layer.intermediate_size, layer.hidden_size),
        "down_proj": (layer.hidden_size, layer.intermediate_size),
        "lm_head": (model.config.draft_vocab_size, layer.hidden_size),
    }
    for module, parts in _NAMES.items():
        shape = sizes.get(module, (layer.hidden_size,))
        values = []
        for part, rows in zip(parts, _part_sizes(model, module, shape[0]), strict=True):
            wanted, value = (rows, *shape[1:]), rest.pop(f"{part}.weight", None)
            if value is None or tuple(value.shape) != wanted:
                found = "is missing" if value is None else f"has shape {tuple(value.shape)}"
                raise ModelError(f"{part}.weight {found}, this drafter's configuration implies {wanted}; export again")
            values.append(value)
        fused = torch.cat(values) if len(values) > 1 else values[0]
        yield f"{module}.weight", fused / _columns(model, fused) if module == "fc" else fused
    yield "draft_ids_J", _draft_ids(model, rest)
    rest.pop("embed_tokens.weight", None)  # the target's embedding is shared, as in the servers
    if rest:
        raise ModelError(f"tensor {min(rest)} is not part of a one-layer EAGLE-3 drafter; export it without")


def _draft_ids(model: Eagle3Model, rest: dict[str, Tensor]) -> Tensor:
    """Target ids of the draft vocabulary, [J]; takes d2t and t2d out of `rest`."""
    size, vocab = model.config.draft_vocab_size, model.config.layer.vocab_size
    offsets_J, known_V = rest.pop("d2t", None), rest.pop("t2d", None)
    if offsets_J is None and size < vocab:
        raise ModelError(f"d2t is missing, though the draft vocabulary ({size}) is not the target's ({vocab})")
    ids_J = torch.arange(size)
    if offsets_J is not None:
        if offsets_J.shape != (size,):
            raise ModelError(f"d2t has shape {tuple(offsets_J.shape)}, draft_vocab_size is {size}; export again")
        ids_J = ids_J + offsets_J.to("cpu", torch.int64)
    if not bool(((ids_J >= 0) & (ids_J < vocab)).all() and (ids_J.diff() > 0).all()):
        raise ModelError(
            f"d2t does not map the draft vocabulary to ascending token ids below {vocab} (first {int(ids_J[0])}, last "
            f"{int(ids_J[-1])}); it must hold offsets, target id minus draft id"
        )
    if known_V is not None and not torch.equal(known_V.cpu().nonzero().squeeze(1), ids_J):
        raise ModelError("t2d and d2t name different tokens; export both from the same draft vocabulary")
    return ids_J


def _columns(model: Eagle3Model, fc_weight: Tensor) -> Tensor:
    """The scale of each of fc's columns."""
    scales = torch.tensor(model.tap_scales, dtype=fc_weight.dtype, device=fc_weight.device)
    return scales.repeat_interleave(fc_weight.shape[1] // len(scales))


def _part_sizes(model: Eagle3Model, module: str, rows: int) -> list[int]:
    if module == "qkv_proj":
        return [heads * model.head_dim for heads in model.heads]
    parts = len(_NAMES[module])
    return [rows // parts] * parts


def save_eagle3(model: Eagle3Model, out_dir: Path, *, dtype: torch.dtype) -> None:
    """Write the folder that vLLM and SGLang load; an existing one is replaced.  All or nothing.

    vLLM guesses the method from the folder's name: have `eagle3` in it.  Raises StoreError where the disk refuses, and
    ModelError that names a tensor with NaN or infinite numbers.
    """
    tensors = _stored(model, dtype)
    _check_finite(tensors, out_dir, "it is not written; train again from an earlier drafter, at a lower learning rate")
    config = json.dumps(_config_json(model, dtype), indent=1)

    def write(folder: Path) -> None:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(config, encoding="utf-8")

    write_folder_atomically(out_dir, write)


def _stored(model: Eagle3Model, dtype: torch.dtype) -> dict[str, Tensor]:
    """Copies of `export_weights` on the CPU."""
    tensors = export_weights(model).items()
    typed = {name: value.to(dtype) if value.is_floating_point() else value for name, value in tensors}
    return {name: value.cpu().clone(memory_format=torch.contiguous_format) for name, value in typed.items()}


def _check_finite(tensors: Mapping[str, Tensor], folder: Path, consequence: str) -> None:
    for name, value in tensors.items():
        if not is_finite(value):
            raise ModelError(f"drafter {folder}: {name} holds NaN or infinite numbers; {consequence}")


def _config_json(model: Eagle3Model, dtype: torch.dtype) -> dict[str, Any]:
    taps = model.config.taps
    raw = model.config.layer.to_hf() | {
        "architectures": [_ARCHITECTURE],
        "draft_vocab_size": model.config.draft_vocab_size,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": list(taps),
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in taps],
        },
        "tap_scales": list(model.tap_scales),  # already in `fc`; further training starts from the unfolded weights
    }
    raw["dtype"] = raw["torch_dtype"] = str(dtype).removeprefix("torch.")
    return raw


def check_eagle3(folder: Path, target: DecoderConfig) -> Eagle3Model:
    """The drafter for this target that a folder holds, without memory for its weights.  Reads config.json, and of the
    weights names, shapes and the maps of token ids alone.  Raises ModelError naming what does not fit."""
    model = _described(folder, target)
    try:
        with safe_open(folder / "model.safetensors", framework="pt") as file:
            tensors = {}
            for name in file.keys():  # noqa: SIM118, not a dictionary
                part, known = file.get_slice(name), _MAPS.get(name, _WEIGHTS)
                if (kind := part.get_dtype()) not in known:
                    raise ModelError(
                        f"drafter {folder}: {name} is stored as {kind}, but only {', '.join(known)} can be read; "
                        "export it again, not quantised"
                    )
                whole = name in _MAPS
                tensors[name] = file.get_tensor(name) if whole else torch.empty(part.get_shape(), device="meta")
    except (OSError, SafetensorError) as error:
        raise _unreadable(folder, error) from None
    try:
        for _ in import_weights(model, tensors):
            pass
    except ModelError as error:
        raise ModelError(f"drafter {folder}: {error}") from None
    return model


def load_eagle3(folder: Path, target: DecoderConfig, *, device: torch.device | str = "cpu") -> Eagle3Model:
    """Read a drafter for this target, in float32.  Raises ModelError naming what does not fit."""
    model = check_eagle3(folder, target)  # before memory is taken for it
    tensors = load_file(folder / "model.safetensors")
    _check_finite(tensors, folder, "make another one with 'tlt warmup', or copy it again")
    model.to_empty(device="cpu")
    with torch.no_grad():
        state = model.state_dict()
        floats = {n: v.float() if v.is_floating_point() else v for n, v in tensors.items()}
        for name, value in import_weights(model, floats):
            state[name].copy_(value)
    return model.to(device)


def check_layout(folder: Path, target: DecoderConfig) -> None:
    """Is the drafter exactly as `save_eagle3` writes it?  `load_eagle3` reads other spellings too, servers do not.

    Raises ModelError naming the key or tensor that differs.
    """
    path = folder / "model.safetensors"
    if others := sorted(x.name for x in folder.glob("*.safetensors*") if x != path):
        raise ModelError(f"drafter {folder}: weights must lie in {path.name} alone, not in {others[0]}; export again")
    model = load_eagle3(folder, target)
    found = load_file(path)
    dtype = found["lm_head.weight"].dtype
    wanted = _stored(model, dtype)
    for name in sorted(found.keys() ^ wanted.keys()):
        what = "is not part of the layout: servers drop it" if name in found else "is missing: servers need it"
        raise ModelError(f"drafter {folder}: tensor {name} {what}; export again")
    for name, value in wanted.items():
        if found[name].dtype != value.dtype:
            raise ModelError(f"drafter {folder}: {name} is {found[name].dtype}, not {value.dtype}; export again")
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for key, value in json.loads(json.dumps(_config_json(model, dtype))).items():
        if raw.get(key) != value:
            raise ModelError(
                f"drafter {folder}: config.json has {key}={raw.get(key)!r}, the servers need {value!r}; export again"
            )


def _described(folder: Path, target: DecoderConfig) -> Eagle3Model:
    """The drafter that config.json describes, without memory for its weights.  Raises ModelError."""
    try:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable(folder, error) from None
    if not isinstance(raw, dict):
        raise ModelError(f"drafter {folder}: config.json must hold a JSON object; export the drafter again")
    try:
        model = blank_eagle3(_read_config(raw, target), dtype=torch.float32, device="meta")
        model.tap_scales = tuple(float(value) for value in raw.get("tap_scales", model.tap_scales))
        if len(model.tap_scales) != 3 or not all(math.isfinite(scale) and scale > 0 for scale in model.tap_scales):
            raise ModelError(f"tap_scales={model.tap_scales} must be 3 positive numbers; export the drafter again")
    except ModelError as error:
        raise ModelError(f"drafter {folder}: {error}") from None
    except KeyError as error:
        raise ModelError(f"drafter {folder}: config.json lacks the key {error}; export the drafter again") from None
    except (AttributeError, ArithmeticError, TypeError, ValueError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]  # torch appends its stack
        raise ModelError(f"drafter {folder}: config.json has a malformed value ({reason}); export it again") from None
    return model


def _unreadable(folder: Path, error: Exception) -> ModelError:
    return ModelError(
        f"{folder} is not a readable drafter folder ({error}); it must hold config.json and model.safetensors, as "
        "'tlt warmup' writes them"
    )


def _read_config(raw: dict[str, Any], target: DecoderConfig) -> Eagle3Config:
    for key, wanted in _ONLY.items():
        if raw.get(key, wanted) != wanted:
            raise ModelError(f"{key}={raw[key]!r} is not supported (only {wanted!r} is); train a drafter without it")
    layer = DecoderConfig.from_hf(raw | {"tie_word_embeddings": False})
    for key, found, wanted in (
        ("vocab_size", layer.vocab_size, target.vocab_size),
        ("hidden_size", layer.hidden_size, target.hidden_size),
        ("target_hidden_size", raw.get("target_hidden_size", target.hidden_size), target.hidden_size),
    ):
        if found != wanted:
            raise ModelError(f"{key} is {found}, but the target's is {wanted}; use a drafter trained for this target")
    size = raw.get("draft_vocab_size") or layer.vocab_size
    if not isinstance(size, int) or not 0 < size <= layer.vocab_size:
        raise ModelError(
            f"draft_vocab_size {size!r} is larger than the target's vocabulary ({layer.vocab_size}), or no positive "
            "whole number; export the drafter again"
        )
    try:
        nested = (raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
        top = raw.get("eagle_aux_hidden_state_layer_ids") or (nested and [layer_id + 1 for layer_id in nested])
        taps = tuple(top or default_taps(target.num_layers))
        check_taps(taps, target)
    except (AttributeError, TypeError):
        raise ModelError("eagle_aux_hidden_state_layer_ids are no list of numbers; export the drafter again") from None
    return Eagle3Config(layer, size, taps)
