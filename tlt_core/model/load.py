"""Checkpoints in and out: Hugging Face folders of safetensors <-> `Decoder`.

Nothing is unpickled.  Every problem is a `ModelError` that names the file and the remedy.
"""

import json
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tlt_core.items.store import is_finite, write_atomically, write_folder_atomically
from tlt_core.model import foreign
from tlt_core.model.config import DecoderConfig, ModelError
from tlt_core.model.decoder import Decoder
from tlt_core.model.embedded import EMBEDDED_NAME, embedded_model_dir

_PLAIN = {  # our name -> Hugging Face's, inside a layer; all but the fused projections
    "input_norm.weight": "input_layernorm.weight",
    "q_norm.weight": "self_attn.q_norm.weight",
    "k_norm.weight": "self_attn.k_norm.weight",
    "o_proj.weight": "self_attn.o_proj.weight",
    "post_norm.weight": "post_attention_layernorm.weight",
    "down_proj.weight": "mlp.down_proj.weight",
}
ENDS = ("model.embed_tokens.weight", "lm_head.weight")
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)


def resolve(path: str | Path) -> Path:
    """Folder of a model: a local folder, the embedded model, or a hub name (downloaded), with `@REVISION` if it is to
    be a certain commit, tag or branch.  Raises ModelError."""
    if str(path) == EMBEDDED_NAME:
        return embedded_model_dir()
    folder = Path(path)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(f"{folder} has no config.json; it is not a Hugging Face model folder")
        return folder
    if folder.is_absolute() or str(path).startswith(".") or str(path).count("/") != 1:
        raise ModelError(
            f"model folder {path} does not exist; give a local folder, a hub name (owner/name, owner/name@COMMIT), or "
            f"{EMBEDDED_NAME!r}"
        )
    return _download(str(path))


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    repository, _, revision = name.partition("@")
    kept = ["*.safetensors", "*.json", "*.jinja", "*.txt"]  # no code, no pickles
    try:
        return Path(snapshot_download(repository, revision=revision or None, allow_patterns=kept))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(
            f"model {name!r} is neither a local folder nor can it be had from the hub ({type(error).__name__}); check "
            f"the spelling and the network, or use model.path={EMBEDDED_NAME}, which needs no network"
        ) from None


def load_config(folder: Path) -> DecoderConfig:
    """Read `config.json`.  Raises ModelError."""
    path = folder / "config.json"
    raw = _read_json(path)
    # The token that ends a chat turn may stand in the generation settings only (Llama 3, Qwen2.5).
    generation = folder / "generation_config.json"
    if generation.is_file() and (eos := _read_json(generation).get("eos_token_id")) is not None:
        raw["eos_token_id"] = eos
    try:
        try:
            config = DecoderConfig.from_hf(raw)
        except ModelError as error:
            config = foreign.foreign_config(raw, why=str(error))
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None
    except KeyError as error:
        raise ModelError(f"{path} lacks the key {error}; is it the configuration of a language model?") from None
    return replace(config, tie_word_embeddings=config.tie_word_embeddings and not _has_own_head(folder))


def _has_own_head(folder: Path) -> bool:
    """Is there an LM head that is not the embedding, as fine-tuning may leave it?  Then it counts, whatever config.json
    says: transformers 5 and vLLM compute with it.  Raises ModelError."""
    embedding, head = ENDS
    is_there = any(folder.glob("*.safetensors")) and read_tensors(folder, only=(head,))
    if not is_there:
        return False
    return not torch.equal(is_there[head].float(), read_tensors(folder, only=(embedding,))[embedding].float())


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read as JSON ({error}); download or copy the model again") from None
    if not isinstance(raw, dict):
        raise ModelError(f"{path} must hold a JSON object, found {type(raw).__name__}; download the model again")
    return raw


def load_decoder(folder: Path, *, dtype: torch.dtype, device: str | torch.device = "cpu") -> Decoder:
    """Build the decoder and fill it from the folder's safetensors.  Raises ModelError."""
    config = load_config(folder)
    if config.foreign:
        theirs = foreign.read(folder, config, dtype=dtype)
        bad = next((name for name, weight in theirs.named_parameters() if not is_finite(weight)), None)
        if bad is not None:
            raise ModelError(f"{folder}: {bad} holds NaN or infinite numbers; download or copy the model again")
        return theirs.to(device)
    decoder = empty_decoder(config)
    raw = read_tensors(folder)
    wanted = {name: tuple(p.shape) for name, p in decoder.named_parameters()}
    _require_shapes(raw, folder, wanted)  # before memory of the size that config.json tells is taken
    decoder = decoder.to(dtype).to_empty(device=device)
    decoder.load_weights(_from_hf(raw, config, folder, wanted))
    if raw:
        raise ModelError(
            f"{folder} holds {len(raw)} unexpected tensors, e.g. {sorted(raw)[0]}; config.json calls it a "
            f"{config.family} model of {config.num_layers} layers: are the two of the same checkpoint?"
        )
    return decoder


def empty_decoder(config: DecoderConfig) -> Decoder:
    """Without memory for its weights."""
    with torch.device("meta"):
        return foreign.ForeignDecoder(config) if config.foreign else Decoder(config)


def random_decoder(config: DecoderConfig, *, seed: int, dtype: torch.dtype) -> Decoder:
    """Normally distributed weights (std 0.02, as these families initialise them) that depend on the seed alone."""
    decoder = empty_decoder(config).float().to_empty(device="cpu")  # torch's own initialisation may take minutes
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            elif name.endswith("bias"):
                parameter.zero_()
            else:
                parameter.normal_(0.0, 0.02, generator=generator)
    return decoder.to(dtype)


def load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        # False, not the default, which asks on the terminal whether the folder's code shall run.
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{folder} has no usable tokenizer ({error}); copy tokenizer.json and its config there"
        ) from None


def stop_token_ids(folder: Path, tokenizer: Any, *, also: Iterable[int] = ()) -> tuple[int, ...]:
    """Tokens that end a response: the model's and the tokenizer's ends of sequence, the token with which the chat
    template ends a turn (of a base model they may be different tokens), and `also`."""
    ids = {*load_config(folder).eos_token_ids, *also, tokenizer.eos_token_id, _end_of_turn(tokenizer)}
    return tuple(sorted(token for token in ids if token is not None))


def save_stop_token_ids(folder: Path, stops: Sequence[int]) -> None:
    """Have servers of this model end a response where these tokens do: they read generation_config.json.

    Raises ModelError, and StoreError where the disk refuses.
    """
    if set(stops) <= set(load_config(folder).eos_token_ids):
        return
    path = folder / "generation_config.json"
    raw = (_read_json(path) if path.is_file() else {}) | {"eos_token_id": list(stops)}
    write_atomically(path, lambda partial: partial.write_text(json.dumps(raw, indent=1)))


def _end_of_turn(tokenizer: Any) -> int | None:
    """The special token that the chat template puts behind an assistant's message; None: it puts none there."""
    if not tokenizer.chat_template:
        return None
    said = "The answer is 42."
    turn = [{"role": "user", "content": "What is the answer?"}, {"role": "assistant", "content": said}]
    try:
        text = tokenizer.apply_chat_template(turn, tokenize=False)
    except TemplateError:  # it renders prompts alone
        return None
    _, is_there, rest = text.rpartition(said)
    behind = tokenizer.encode(rest.lstrip(), add_special_tokens=False) if is_there else []
    return behind[0] if behind and behind[0] in tokenizer.added_tokens_decoder else None


def hf_tensors(
    weights: Iterable[tuple[str, Tensor]], config: DecoderConfig, *, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """The decoder's parameters by name -> the tensors of a Hugging Face folder, on the CPU, one after the other."""
    d = config.head_dim
    for name, weight in weights:
        if config.foreign:
            yield name, weight.to("cpu", dtype).contiguous()
            continue
        names = _hf_names(name)
        if ".qkv_proj." in name:
            parts = weight.split([config.num_heads * d, config.num_kv_heads * d, config.num_kv_heads * d])
        else:
            parts = weight.chunk(len(names))
        for hf, part in zip(names, parts, strict=True):
            yield hf, part.to("cpu", dtype).contiguous()


def save_hf(
    weights: Iterable[tuple[str, Tensor]],
    config: DecoderConfig,
    out_dir: Path,
    *,
    tokenizer_from: Path,
    dtype: torch.dtype,
) -> None:
    """Write a plain Hugging Face folder that transformers, vLLM and SGLang load; an existing one is replaced.

    `weights` are the decoder's parameters by name, each one once.  All or nothing.  Raises StoreError where the disk
    refuses.
    """
    tensors = dict(hf_tensors(weights, config, dtype=dtype))
    wanted = [name for name, _ in empty_decoder(config).named_parameters()]
    missing = {*(wanted if config.foreign else (hf for name in wanted for hf in _hf_names(name)))} - tensors.keys()
    assert not missing, f"weights to save lack {sorted(missing)[0]}"
    raw = json.loads(config.foreign) if config.foreign else config.to_hf()
    raw["tie_word_embeddings"] = config.tie_word_embeddings
    # transformers 5 reads the first key; transformers 4 and the servers read the second.
    raw["dtype"] = raw["torch_dtype"] = str(dtype).removeprefix("torch.")

    def write(folder: Path) -> None:
        if config.foreign:
            foreign.write(tensors, config, folder)
        else:
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(raw, indent=1))
        for name in _TOKENIZER_FILES:
            if (tokenizer_from / name).is_file():
                shutil.copyfile(tokenizer_from / name, folder / name)

    write_folder_atomically(out_dir, write)


def read_tensors(folder: Path, *, only: Collection[str] | None = None) -> dict[str, Tensor]:
    """The tensors of a checkpoint by their names in it.  only: those that are read.  Raises ModelError."""
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.is_file():
        names = sorted(set(_read_json(index).get("weight_map", {}).values()))
    tensors: dict[str, Tensor] = {}
    for name in names:
        path = folder / name
        if path.parent != folder or not path.is_file():
            raise ModelError(
                f"{path} does not exist; the checkpoint is incomplete (download or copy it again) or not in the "
                "safetensors format (convert it: other formats run code when they are read)"
            )
        tensors |= _tensors_in(path, only=only)
    return tensors


def check_finite(folder: Path) -> None:
    """Raises ModelError that names a tensor with NaN or infinite numbers: such weights must not leave the run.

    One tensor at a time is in memory.
    """
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in _tensors_in(path):
            if not is_finite(tensor):
                raise ModelError(
                    f"{path}: {name} holds NaN or infinite numbers; train again from an earlier checkpoint, or from a "
                    "sound model"
                )


def _tensors_in(path: Path, *, only: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118, not a dictionary
                if only is None or name in only:
                    yield name, file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is damaged ({error}); download or copy it again") from None


def _require_shapes(raw: Mapping[str, Tensor], folder: Path, wanted: Mapping[str, tuple[int, ...]]) -> None:
    for name, shape in wanted.items():
        parts = []
        for hf in _hf_names(name):
            if hf not in raw:
                raise ModelError(f"{folder} lacks the tensor {hf}; the checkpoint is incomplete or of another family")
            parts.append(tuple(raw[hf].shape))
        found = (sum(part[0] for part in parts), *parts[0][1:]) if all(parts) else ()
        if found != shape or len({part[1:] for part in parts}) > 1:
            raise ModelError(f"{folder}: {_hf_names(name)[0]} has shape {found}, config.json implies {shape}")


def _from_hf(
    raw: dict[str, Tensor], config: DecoderConfig, folder: Path, wanted: Iterable[str]
) -> Iterator[tuple[str, Tensor]]:
    """Take our parameters out of the raw tensors, and remove those there.  Raises ModelError."""
    for name in wanted:
        parts = []
        for hf in _hf_names(name):
            if not is_finite(raw[hf]):
                raise ModelError(f"{folder}: {hf} holds NaN or infinite numbers; download or copy the model again")
            parts.append(raw.pop(hf))
        yield name, torch.cat(parts) if len(parts) > 1 else parts[0]
    if config.tie_word_embeddings:
        raw.pop("lm_head.weight", None)
    for name in [n for n in raw if n.endswith("rotary_emb.inv_freq")]:  # derived; old checkpoints may store it
        del raw[name]


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
