"""llama.cpp as a rival of our engine: its environment, and the model as a GGUF file.  Nothing is quantised.

It rotates neighbouring pairs (0, 1), (2, 3), ... of a head of the architecture `llama`, Hugging Face the pairs
(i, i + head_dim / 2): rows of the query and key matrices are put in that order.  `qwen2` and `qwen3` are rotated alike.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor

from bench.engines import environment
from bench.engines.measure import EngineSpec
from tlt_core.model.config import DecoderConfig, ModelError
from tlt_core.model.load import load_config, read_tensors

NAME = "llama.cpp"
PEER = environment.Peer(NAME, ("xllamacpp==2026.10.11549",))
_PROCESS = Path(__file__).with_name("processes") / "llama_cpp.py"
_ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}
_TYPES = {
    torch.bfloat16: (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    torch.float16: (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    torch.float32: (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
}


def specs(common: Mapping[str, Any], environments: Path, *, work_dir: Path) -> list[EngineSpec]:
    """The model in the configured type and, since not every build is fast with bfloat16, in float16.  work_dir: folder
    for converted models.  Raises PeerError or ModelError where llama.cpp cannot be had for this model."""
    python = environment.interpreter(PEER, environments)
    kinds = {NAME: common["dtype"]} | ({f"{NAME} fp16": "float16"} if common["dtype"] == "bfloat16" else {})
    work_dir.mkdir(parents=True, exist_ok=True)
    found = []
    for name, dtype in kinds.items():
        file = work_dir.absolute() / f"model-{dtype}.gguf"
        write_gguf(Path(common["model"]), file, dtype=getattr(torch, dtype))
        settings = {**common, "dtype": dtype, "weights": str(file)}
        variables = environment.variables(threads=common["threads"])
        found.append(EngineSpec(name, _PROCESS, python, variables, settings, optional=True))
    return found


def write_gguf(folder: Path, out: Path, *, dtype: torch.dtype) -> None:
    """Write `out` from the model in `folder`.  Raises ModelError on what it cannot express."""
    config = load_config(folder)
    if config.rope_scaling is not None:
        raise ModelError(f"{folder}: scaled rotary embeddings (rope_type llama3) are not written as GGUF")
    raw_type, file_type = _TYPES[dtype]
    writer = gguf.GGUFWriter(out, gguf.MODEL_ARCH_NAMES[_ARCHITECTURES[config.family]])
    writer.add_file_type(file_type)
    _add_shape(writer, config)
    _add_tokenizer(writer, config, folder)
    names = gguf.get_tensor_name_map(_ARCHITECTURES[config.family], config.num_layers)
    tensors = read_tensors(folder)
    for hf_name in sorted(tensors):
        name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise ModelError(f"{folder}: tensor {hf_name} has no place in a GGUF file of the family {config.family}")
        tensor = rotated_rows(hf_name, tensors.pop(hf_name), config)
        if tensor.dim() == 1:  # norms and biases, which llama.cpp adds up in float32
            writer.add_tensor(name, tensor.float().numpy())
        else:
            in_bytes = tensor.to(dtype).contiguous().view(torch.uint8)  # numpy has no bfloat16
            writer.add_tensor(name, in_bytes.numpy(), raw_dtype=raw_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def rotated_rows(name: str, tensor: Tensor, config: DecoderConfig) -> Tensor:
    """Query and key rows of a llama, from halves (a0 a1 .. b0 b1 ..) to pairs (a0 b0 a1 b1 ..) in each head."""
    if config.family != "llama" or not name.endswith(("q_proj.weight", "k_proj.weight")):
        return tensor
    half = config.head_dim // 2
    heads = tensor.unflatten(0, (-1, 2, half))  # [heads, 2, half, hidden]
    return heads.transpose(1, 2).flatten(0, 2).contiguous()


def _add_shape(writer: gguf.GGUFWriter, config: DecoderConfig) -> None:
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_layers)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def _add_tokenizer(writer: gguf.GGUFWriter, config: DecoderConfig, folder: Path) -> None:
    """Byte-pair tokens as they are.  How text is split before is not said: requests come as token ids."""
    path = folder / "tokenizer.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        model = raw["model"]
        by_id = {token_id: token for token, token_id in model["vocab"].items()}
        merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]]
        special = {added["id"]: added["content"] for added in raw["added_tokens"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"{path} is no byte-pair tokenizer that can be written as GGUF ({type(error).__name__}: {error})"
        ) from None
    by_id |= special
    kinds = [
        gguf.TokenType.UNUSED if i not in by_id else gguf.TokenType.CONTROL if i in special else gguf.TokenType.NORMAL
        for i in range(config.vocab_size)
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([by_id.get(i, f"[unused{i}]") for i in range(config.vocab_size)])
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    if config.eos_token_ids:
        writer.add_eos_token_id(config.eos_token_ids[0])
    if config.bos_token_id is not None:
        writer.add_bos_token_id(config.bos_token_id)
    writer.add_add_bos_token(False)
