"""Shapes of models by name, so that memory and time can be calculated before anything is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tlt_core.model.config import DecoderConfig
from tlt_core.model.embedded import EMBEDDED_NAME
from tlt_core.model.load import load_config

if TYPE_CHECKING:  # benchmarks on a bare machine have no pydantic
    from conf.model import ModelConfig

_VOCAB = 49_152  # of the embedded model and of random ones


def shape(
    family: str,
    vocab: int,
    hidden: int,
    inner: int,
    layers: int,
    heads: int,
    kv: int,
    *,
    tied: bool = False,
    head_dim: int | None = None,
) -> DecoderConfig:
    """Sizes alone: what does not change memory or time has some usual value."""
    return DecoderConfig(
        family=family,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv,
        head_dim=head_dim or hidden // heads,
        rms_norm_eps=1e-6,
        rope_theta=500_000.0,
        rope_scaling=None,
        tie_word_embeddings=tied,
        max_position_embeddings=32_768,
        eos_token_ids=(),
    )


# From the models' config.json.
KNOWN = {
    EMBEDDED_NAME: shape("llama", _VOCAB, 576, 1536, 30, 9, 3, tied=True),
    "qwen2.5-0.5b": shape("qwen2", 151_936, 896, 4864, 24, 14, 2, tied=True),
    "qwen2.5-1.5b": shape("qwen2", 151_936, 1536, 8960, 28, 12, 2, tied=True),
    "qwen2.5-3b": shape("qwen2", 151_936, 2048, 11_008, 36, 16, 2, tied=True),
    "qwen2.5-7b": shape("qwen2", 152_064, 3584, 18_944, 28, 28, 4),
    "qwen2.5-14b": shape("qwen2", 152_064, 5120, 13_824, 48, 40, 8),
    "qwen2.5-32b": shape("qwen2", 152_064, 5120, 27_648, 64, 40, 8),
    "llama-3.1-8b": shape("llama", 128_256, 4096, 14_336, 32, 32, 8),
    "qwen3-4b": shape("qwen3", 151_936, 2560, 9728, 36, 32, 8, tied=True, head_dim=128),
    "qwen3-8b": shape("qwen3", 151_936, 4096, 12_288, 36, 32, 8, head_dim=128),
}


def shape_of(model: ModelConfig) -> DecoderConfig | None:
    """Shape of a run's model; None: the model is neither known nor on this machine.  Raises ModelError."""
    if model.kind == "random":
        return shape(
            "llama",
            _VOCAB,
            model.hidden_size,
            model.intermediate_size,
            model.num_layers,
            model.num_heads,
            model.num_kv_heads,
            tied=True,
        )
    if (Path(model.path) / "config.json").is_file():
        return load_config(Path(model.path))
    return KNOWN.get(Path(model.path).name.lower().removesuffix("-instruct")) or KNOWN.get(model.path)
