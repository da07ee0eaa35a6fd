"""Checkpoints in and out: Hugging Face folders of safetensors <-> `Decoder`.

Nothing is unpickled.  Every problem is a `ModelError` that names the file and the remedy.
"""

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tlt_core.model.config import DecoderConfig, ModelError
from tlt_core.model.decoder import Decoder
from tlt_core.model.embedded import EMBEDDED_NAME, embedded_model_dir

_PLAIN = {  # ours -> Hugging Face, inside a layer
    "input_norm.weight": "input_layernorm.weight",
    "q_norm.weight": "self_attn.q_norm.weight",
    "k_norm.weight": "self_attn.k_norm.weight",
    "o_proj.weight": "self_attn.o_proj.weight",
    "post_norm.weight": "post_attention_layernorm.weight",
    "down_proj.weight": "mlp.down_proj.weight",
}
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
    "vocab.json",
    "merges.txt",
)


def resolve(path: str | Path) -> Path:
    """Folder of a model: a local folder, the embedded model, or a hub name (downloaded).  Raises ModelError."""
    if str(path) == EMBEDDED_NAME:
        return embedded_model_dir()
    folder = Path(path)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(f"{folder} has no config.json; it is not a Hugging Face model folder")
        return folder
    if folder.is_absolute() or str(path).startswith(".") or str(path).count("/") != 1:
        raise ModelError(
            f"model folder {path} does not exist; give a local folder, a hub name (owner/name), or {EMBEDDED_NAME!r}"
        )
    return _download(str(path))


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=["*.safetensors", "*.json", "*.jinja", "*.txt"]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(
            f"model {name!r} is neither a local folder nor can it be had from the hub ({type(error).__name__}); check "
            f"the spelling and the network, or use model.path={EMBEDDED_NAME}, which needs neither"
        ) from None


def load_config(folder: Path) -> DecoderConfig:
    """Read `config.json`.  Raises ModelError."""
    path = folder / "config.json"
    try:
        return DecoderConfig.from_hf(json.loads(path.read_text()))
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None
    except (OSError, json.JSONDecodeError, KeyError) as error:
        raise ModelError(f"{path} cannot be read as a model configuration: {error!r}") from None


def load_decoder(folder: Path, *, dtype: torch.dtype, device: str | torch.device = "cpu") -> Decoder:
    """Build the decoder and fill it from the folder's safetensors.  Raises ModelError."""
    config = load_config(folder)
    decoder = Decoder(config).to(dtype=dtype)
    decoder.reset_frequencies()
    raw = _read_tensors(folder)
    wanted = {name: tuple(p.shape) for name, p in decoder.named_parameters()}
    decoder.load_weights((name, value) for name, value in _from_hf(raw, config, folder, wanted))
    if raw:
        raise ModelError(
            f"{folder} holds unexpected tensors, e.g. {sorted(raw)[0]}; is it a {config.family} checkpoint?"
        )
    return decoder.to(device)


def random_decoder(config: DecoderConfig, *, seed: int, dtype: torch.dtype) -> Decoder:
    """Normally distributed weights (std 0.02 as in the families' own initialisation), from the seed alone."""
    decoder = Decoder(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            elif name.endswith("bias"):
                parameter.zero_()
            else:
                parameter.normal_(0.0, 0.02, generator=generator)
    decoder = decoder.to(dtype=dtype)
    decoder.reset_frequencies()
    return decoder


def load_tokenizer(folder: Path) -> Any:
    """The folder's tokenizer.  Raises ModelError."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{folder} has no usable tokenizer ({error}); copy tokenizer.json and its config there"
        ) from None


def stop_token_ids(folder: Path, tokenizer: Any) -> tuple[int, ...]:
    """Tokens that end a response: the model's and the tokenizer's end-of-sequence tokens."""
    ids = set(load_config(folder).eos_token_ids)
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return tuple(sorted(ids))


def save_hf(
    weights: Iterable[tuple[str, Tensor]],
    config: DecoderConfig,
    out_dir: Path,
    *,
    tokenizer_from: Path,
    dtype: torch.dtype,
) -> None:
    """Write a plain Hugging Face folder that transformers, vLLM and SGLang load.  All or nothing."""
    partial = out_dir.with_name(f".{out_dir.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        tensors = {hf: part.to(dtype).contiguous() for name, w in weights for hf, part in _to_hf(name, w, config)}
        save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
        raw = config.to_hf() | {
            "dtype": str(dtype).removeprefix("torch."),
            "torch_dtype": str(dtype).removeprefix("torch."),
        }
        (partial / "config.json").write_text(json.dumps(raw, indent=1))
        for name in _TOKENIZER_FILES:
            if (tokenizer_from / name).is_file():
                shutil.copyfile(tokenizer_from / name, partial / name)
        shutil.rmtree(out_dir, ignore_errors=True)
        partial.rename(out_dir)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    tensors: dict[str, Tensor] = {}
    for name in names:
        path = folder / name
        if path.parent != folder or not path.is_file():
            raise ModelError(f"{path} does not exist; the checkpoint is incomplete: download or copy it again")
        try:
            with safe_open(path, framework="pt") as file:
                tensors |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118, not a dictionary
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} is damaged ({error}); download or copy it again") from None
    return tensors


def _from_hf(
    raw: dict[str, Tensor], config: DecoderConfig, folder: Path, wanted: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, Tensor]]:
    """Take (and remove) our parameters out of the raw tensors."""
    for name, shape in wanted.items():
        parts = []
        for hf in _hf_names(name):
            if hf not in raw:
                raise ModelError(f"{folder} lacks the tensor {hf}; the checkpoint is incomplete or of another family")
            parts.append(raw.pop(hf))
        value = torch.cat(parts) if len(parts) > 1 else parts[0]
        if tuple(value.shape) != shape:
            raise ModelError(
                f"{folder}: {_hf_names(name)[0]} has shape {tuple(value.shape)}, config.json implies {shape}"
            )
        yield name, value
    if config.tie_word_embeddings:
        raw.pop("lm_head.weight", None)


def _hf_names(name: str) -> list[str]:
    """Hugging Face names of the parts of one of our parameters, in the order they are fused."""
    if not name.startswith("layers."):
        return [name if name == "lm_head.weight" else f"model.{name}"]
    _, index, rest = name.split(".", 2)
    prefix = f"model.layers.{index}."
    module, kind = rest.rsplit(".", 1)
    if module == "qkv_proj":
        return [f"{prefix}self_attn.{x}_proj.{kind}" for x in "qkv"]
    if module == "gate_up_proj":
        return [f"{prefix}mlp.{x}_proj.{kind}" for x in ("gate", "up")]
    return [prefix + _PLAIN[rest]]


def _to_hf(name: str, value: Tensor, config: DecoderConfig) -> Iterator[tuple[str, Tensor]]:
    names = _hf_names(name)
    if ".qkv_proj." in name:
        d = config.head_dim
        parts = value.split([config.num_heads * d, config.num_kv_heads * d, config.num_kv_heads * d])
    else:
        parts = value.chunk(len(names))
    yield from zip(names, parts, strict=True)
