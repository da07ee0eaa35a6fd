"""Shape of a Llama-, Qwen2- or Qwen3-family decoder, read from and written to a Hugging Face `config.json`."""

from dataclasses import asdict, dataclass, fields
from typing import Any

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_ONLY = {  # settings for which only this value is implemented
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
_SIZES_OR_NULL = ("num_key_value_heads", "head_dim")
_RANGES = {  # wide ones: beyond them a frequency or a norm is no number any more
    "rms_norm_eps": (1e-20, 1.0),
    "rope_theta": (1.0, 1e15),
    "factor": (1e-3, 1e6),
    "low_freq_factor": (1e-3, 1e6),
    "high_freq_factor": (1e-3, 1e6),
    "original_max_position_embeddings": (1, 1e12),
}


class ModelError(ValueError):
    """A checkpoint that cannot be used.  The text names the folder or file, the problem and the remedy."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3's frequency scaling (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """What `Decoder` is built from.  DecoderConfig(family="llama", vocab_size=49152, hidden_size=576, ...)"""

    family: str  # llama, qwen2 or qwen3; if `foreign`, any of transformers' names
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_word_embeddings: bool
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None = None  # this and the next are only kept for readers of our exports
    pad_token_id: int | None = None
    foreign: str = ""  # config.json of a family that transformers computes (see `foreign`); empty: we do

    @property
    def qk_norm(self) -> bool:
        """Qwen3 normalises query and key heads."""
        return self.family == "qwen3"

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> "DecoderConfig":
        """Read a `config.json` (transformers 4 or 5 spelling).  Raises ModelError on what is not supported."""
        family = raw.get("model_type")
        if not isinstance(family, str) or family not in _ARCHITECTURES:
            raise ModelError(
                f"model_type {family!r} is not supported; supported are {', '.join(_ARCHITECTURES)} "
                f"({', '.join(_ARCHITECTURES.values())})"
            )
        for key, wanted in _ONLY.items():
            if raw.get(key, wanted) != wanted and not (key == "attention_bias" and family == "qwen2"):
                raise ModelError(f"{key}={raw[key]!r} is not supported for {family} (only {wanted!r} is)")
        if "sliding_attention" in str(raw.get("layer_types")):
            raise ModelError("layers with sliding_attention are not supported (only full_attention is)")
        _check_kinds(raw)
        heads = raw["num_attention_heads"]
        kv_heads, head_dim = raw.get("num_key_value_heads") or heads, raw.get("head_dim") or raw["hidden_size"] // heads
        if heads % kv_heads or head_dim % 2:
            raise ModelError(
                f"{heads} heads of size {head_dim} on {kv_heads} key/value heads are no attention: the size must be "
                "even, and the heads a multiple of the key/value heads; download or copy config.json again"
            )
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        eos = raw.get("eos_token_id")
        return cls(
            family=family,
            vocab_size=raw["vocab_size"],
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            num_layers=raw["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=raw.get("rms_norm_eps") or 1e-6,
            rope_theta=rope.get("rope_theta") or raw.get("rope_theta") or 10000.0,
            rope_scaling=_rope_scaling(rope),
            tie_word_embeddings=raw.get("tie_word_embeddings", False),
            max_position_embeddings=raw.get("max_position_embeddings", 2048),
            eos_token_ids=() if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
            bos_token_id=raw.get("bos_token_id"),
            pad_token_id=raw.get("pad_token_id"),
        )

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` that transformers 4 and 5, vLLM and SGLang read."""
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": self.rope_theta}
        if self.rope_scaling is not None:
            rope |= {"rope_type": "llama3"} | asdict(self.rope_scaling)
        raw = {
            "architectures": [_ARCHITECTURES[self.family]],
            "model_type": self.family,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_parameters": rope,
            "tie_word_embeddings": self.tie_word_embeddings,
            "max_position_embeddings": self.max_position_embeddings,
            "bos_token_id": self.bos_token_id,
            "pad_token_id": self.pad_token_id,
        }
        if self.rope_scaling is not None:
            raw["rope_scaling"] = rope
        if self.eos_token_ids:
            raw["eos_token_id"] = self.eos_token_ids[0] if len(self.eos_token_ids) == 1 else list(self.eos_token_ids)
        return raw


def _check_kinds(raw: dict[str, Any]) -> None:
    """Raises ModelError where a value cannot be what its key says, as in a damaged file."""
    for key in (*_SIZES, *(key for key in _SIZES_OR_NULL if raw.get(key) is not None)):
        if key in raw and not (_is_whole(raw[key]) and raw[key] > 0):
            raise ModelError(f"{key} is {raw[key]!r}, which is no positive whole number; download or copy it again")
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(raw.get(key) or {}, dict):
            raise ModelError(f"{key} is {raw[key]!r}, which is no JSON object; download or copy it again")
        _check_ranges(raw.get(key) or {})
    _check_ranges(raw)
    eos = raw.get("eos_token_id")
    if not all(_is_whole(token) for token in (eos if isinstance(eos, list) else [eos]) if token is not None):
        raise ModelError(f"eos_token_id is {eos!r}, neither a token id nor a list of them; download or copy it again")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_ranges(raw: dict[str, Any]) -> None:
    for key, (least, most) in _RANGES.items():
        value = raw.get(key)
        if value is not None and not (isinstance(value, float) or _is_whole(value)):
            raise ModelError(f"{key} is {value!r}, which is no number; download or copy it again")
        if value is not None and not least <= value <= most:
            raise ModelError(f"{key} is {value!r}; numbers from {least:g} to {most:g} make sense, download it again")


def _rope_scaling(rope: dict[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind != "llama3":
        raise ModelError(f"rope_type {kind!r} is not supported (default and llama3 are)")
    keys = [field.name for field in fields(RopeScaling)]
    for key in keys:
        if rope.get(key) is None:
            raise ModelError(f"rope_type llama3 lacks the key {key!r}; download or copy config.json again")
    return RopeScaling(**{key: rope[key] for key in keys})
