"""Families that transformers computes: its own module, with our attention in its layers.

    config.json of a family that `Decoder` is not written for -> checks -> ForeignDecoder, used like a `Decoder`

Every layer calls our `attend`, so cache, packing and speculation are the same.  What the layers do besides is
transformers' code: no fused projections and no C kernels, so it is slower.  Names of weights are transformers' own.
"""

import json
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tlt_core.model.config import DecoderConfig, ModelError
from tlt_core.model.decoder import Attend, Decoder, Hidden

_NAME = "tlt"  # of our attention, in transformers
_NEUTRAL = {  # settings that act behind the last layer or within attention, with the values that do nothing
    "final_logit_softcapping": (None,),
    "attn_logit_softcapping": (None,),
    "logits_scaling": (None, 1, 1.0),
    "logit_scale": (None, 1, 1.0),
    "attention_dropout": (None, 0, 0.0),
    "quantization_config": (None,),
}
_LAYERS = {"full_attention", "sliding_attention"}
_attends: list[Attend] = []  # of the pass under way


def foreign_config(raw: dict[str, Any], *, why: str) -> DecoderConfig:
    """Shape of a model that transformers computes.  why: ours cannot.  Raises ModelError."""
    try:
        config = _shape(raw)
        _require_usual(config)
    except ModelError as error:
        raise ModelError(f"{why}; and {error}") from None
    except Exception as error:  # transformers' code, on somebody's file, may raise anything
        raise ModelError(f"{why}; and transformers' layers cannot be used ({error!r:.200})") from None
    return config


def _shape(raw: dict[str, Any]) -> DecoderConfig:
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    family = str(raw.get("model_type"))
    theirs: Any = CONFIG_MAPPING[family].from_dict(raw) if family in CONFIG_MAPPING else None
    if theirs is None or type(theirs) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError("it is no text model of transformers")
    for key, neutral in _NEUTRAL.items():
        if getattr(theirs, key, None) not in neutral:
            raise ModelError(f"{key}={getattr(theirs, key)!r} acts where our attention and head do not")
    layers = getattr(theirs, "layer_types", None) or ["full_attention"]
    if unknown := sorted(set(layers) - _LAYERS):
        raise ModelError(f"layers of {', '.join(unknown)} keep no keys and values")
    if changing := sorted(_rope_kinds(getattr(theirs, "rope_parameters", None) or {}) & {"dynamic", "longrope"}):
        raise ModelError(f"with rope_type {changing[0]} a token's position depends on how long others are")
    window = getattr(theirs, "sliding_window", None) if "sliding_attention" in layers else None
    window = window or (raw.get("sliding_window") if raw.get("use_sliding_window", family == "mistral") else None)
    ends, heads = theirs.eos_token_id, theirs.num_attention_heads
    return DecoderConfig(
        family=family,
        vocab_size=theirs.vocab_size,
        hidden_size=theirs.hidden_size,
        intermediate_size=getattr(theirs, "intermediate_size", None) or 4 * theirs.hidden_size,
        num_layers=theirs.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=getattr(theirs, "num_key_value_heads", None) or heads,
        head_dim=getattr(theirs, "head_dim", None) or theirs.hidden_size // heads,
        rms_norm_eps=getattr(theirs, "rms_norm_eps", 1e-6),
        rope_theta=10000.0,
        rope_scaling=None,
        tie_word_embeddings=bool(theirs.tie_word_embeddings),
        # Within its window a sliding layer sees everything.
        max_position_embeddings=min(theirs.max_position_embeddings, window or theirs.max_position_embeddings),
        eos_token_ids=() if ends is None else (ends,) if isinstance(ends, int) else tuple(ends),
        bos_token_id=theirs.bos_token_id,
        pad_token_id=theirs.pad_token_id,
        foreign=json.dumps(raw, sort_keys=True),
    )


def _rope_kinds(rope: dict[str, Any]) -> set[str]:
    """All kinds of RoPE in it: some families have one for each kind of layer."""
    nested: set[str] = set().union(*(_rope_kinds(part) for part in rope.values() if isinstance(part, dict)))
    return nested | ({str(rope["rope_type"])} if "rope_type" in rope else set())


def _require_usual(config: DecoderConfig) -> None:
    """Raises ModelError for a network that is not embedding, layers with our attention, norm and head."""
    with torch.device("meta"):
        whole = empty(config)
    base, head = getattr(whole, "model", None), getattr(whole, "lm_head", None)
    parts = all(hasattr(base, part) for part in ("embed_tokens", "layers", "norm"))
    if not parts or not isinstance(head, nn.Linear) or head.bias is not None:
        raise ModelError(f"a {config.family} model has another structure than embedding, layers, norm and head")
    named = {name for name, _ in whole.named_parameters()} | {"lm_head.weight"}
    if beside := sorted(whole.state_dict().keys() - named):
        raise ModelError(f"a {config.family} model keeps {beside[0]}, which is no weight, with its weights")
    if any(name.endswith("sinks") for name in named):
        raise ModelError(f"a {config.family} model has attention sinks, which our attention does not compute")
    seen: list[tuple[int, ...]] = []

    def attend(layer: int, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> Tensor:
        seen.append((layer, *q_THd.shape[1:], *k_TKd.shape[1:], *v_TKd.shape[1:]))
        return q_THd

    for module in whole.modules():
        if hasattr(module, "experts"):  # which expert a token goes to is unknown without numbers
            module.forward = lambda hidden_states, *_, **__: hidden_states
    tokens = torch.arange(3, device="meta")
    ForeignDecoder(config, whole)(tokens, tokens, attend)
    kv = (config.num_kv_heads, config.head_dim)
    if {shape[1:] for shape in seen} != {(config.num_heads, config.head_dim, *kv, *kv)}:
        raise ModelError(f"a {config.family} model attends with heads of {seen[0][1:]}, and not as its sizes say")


def empty(config: DecoderConfig) -> Any:
    """transformers' module, not initialised with anybody's weights."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    _register()
    theirs = CONFIG_MAPPING[config.family].from_dict(json.loads(config.foreign))
    theirs.tie_word_embeddings = config.tie_word_embeddings
    return AutoModelForCausalLM.from_config(theirs, attn_implementation=_NAME)


def read(folder: Path, config: DecoderConfig, *, dtype: torch.dtype) -> "ForeignDecoder":
    """From a Hugging Face folder.  Raises ModelError."""
    import transformers

    _register()
    auto: Any = transformers.AutoModelForCausalLM
    transformers.utils.logging.disable_progress_bar()
    try:
        whole, found = auto.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=_NAME,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"{folder} cannot be loaded ({error}); download or copy it again") from None
    wrong = sorted(map(str, [*found["missing_keys"], *found["unexpected_keys"], *found["mismatched_keys"]]))
    if wrong:
        raise ModelError(f"{folder}: {len(wrong)} tensors do not fit config.json, e.g. {wrong[0]}; download it again")
    return ForeignDecoder(config, whole)


def write(tensors: dict[str, Tensor], config: DecoderConfig, folder: Path) -> None:
    """Weight files with the names that checkpoints of this family have, which may not be those of its parameters."""
    with torch.device("meta"):
        whole = empty(config)
    whole.save_pretrained(folder, state_dict=tensors)


class ForeignDecoder(Decoder):
    """`Decoder`'s interface over transformers' module.  Parameters have transformers' names."""

    def __init__(self, config: DecoderConfig, whole: Any = None) -> None:
        """whole: transformers' module; None: an empty one."""
        nn.Module.__init__(self)
        self.config = config
        whole = empty(config) if whole is None else whole
        self.model = whole.model.eval()
        if not config.tie_word_embeddings:
            self.lm_head = whole.lm_head
        self.packed_head = self.packed_layers = None

    @property
    def embed_tokens(self) -> nn.Module:  # type: ignore[override]  # a submodule in `Decoder`
        return self.model.embed_tokens  # type: ignore[no-any-return]

    @property
    def layers(self) -> nn.ModuleList:  # type: ignore[override]
        return self.model.layers  # type: ignore[no-any-return]

    def _apply(self, fn: Any, recurse: bool = True) -> "Decoder":
        """Buffers keep their types: bfloat16 ruins rotary frequencies."""
        kept = {name: buffer.dtype for name, buffer in self.named_buffers()}
        exact = {name: buffer.clone() for name, buffer in self.named_buffers()}
        nn.Module._apply(self, fn, recurse)
        for name, buffer in self.named_buffers():
            if buffer.dtype != kept[name]:
                buffer.data = exact[name].to(buffer.device)
        return self

    def reset_frequencies(self) -> None:
        """transformers keeps its own."""

    def forward(self, tokens_T: Tensor, positions_T: Tensor, attend: Attend, *, taps: Sequence[int] = ()) -> Hidden:
        """As `Decoder.forward`.  Raises ModelError where a layer does not attend."""
        if not all(0 <= k <= len(self.layers) for k in taps):
            raise ValueError(f"taps {tuple(taps)}: this decoder has taps 0 to {len(self.layers)}")
        streams: dict[int, Tensor] = {}
        attended: list[int] = []

        def counted(layer: int, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> Tensor:
            attended.append(layer)
            return attend(layer, q_THd, k_TKd, v_TKd)

        def keep(k: int) -> Any:
            return lambda _, given, named: streams.__setitem__(k, (given[0] if given else named["hidden_states"])[0])

        entered = [*self.layers, self.model.norm]
        hooks = [entered[k].register_forward_pre_hook(keep(k), with_kwargs=True) for k in set(taps)]
        _attends.append(counted)
        try:
            ids_1T, positions_1T = tokens_T.long()[None], positions_T.long()[None]
            last_TD = self.model(input_ids=ids_1T, position_ids=positions_1T, use_cache=False).last_hidden_state[0]
        finally:
            _attends.pop()
            for hook in hooks:
                hook.remove()
        if attended != list(range(len(self.layers))):
            raise ModelError(f"layers {attended} of a {self.config.family} model attend, of {len(self.layers)}")
        return Hidden(last_TD, torch.cat([streams[k] for k in taps], dim=-1) if taps else None)


@cache
def _register() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(_NAME, _attention)


def _attention(
    module: nn.Module,
    query_1HTd: Tensor,
    key_1KTd: Tensor,
    value_1KTd: Tensor,
    attention_mask: object,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """What a layer of transformers calls: our `attend`, which divides by the square root of the head's size."""
    if options.get("softcap") is not None or options.get("s_aux") is not None:
        raise ModelError(f"{type(module).__name__} caps its scores or has sinks, which our attention does not compute")
    q_THd, k_TKd, v_TKd = (x[0].transpose(0, 1) for x in (query_1HTd, key_1KTd, value_1KTd))
    usual = 1 / math.sqrt(q_THd.shape[-1])
    if scaling is not None and not math.isclose(scaling, usual):
        q_THd = q_THd * (scaling / usual)
    layer: int = module.layer_idx  # type: ignore[assignment]  # every attention of transformers has it
    return _attends[-1](layer, q_THd, k_TKd, v_TKd)[None].contiguous(), None
