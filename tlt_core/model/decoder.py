"""The decoder: one implementation for rollout, verification and training.

Works on T tokens back to back.  The caller's `attend` decides which tokens see which (a KV cache in rollout, packed
causal attention in training), so the decoder knows neither caches nor padding.  Query-key-value and gate-up projections
are fused.

Shapes: T tokens, D hidden size, H query heads, K key/value heads, d head size, V vocabulary, E tapped width.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.layers.rms_norm import rms_norm
from kernels.layers.rotate import rotate
from kernels.layers.swiglu import swiglu
from kernels.tree.tree_layout import TreeLayout
from tlt_core.model.config import DecoderConfig, ModelError

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""attend(layer, q_THd, k_TKd, v_TKd) -> out_THd"""


class PlacedAttend(NamedTuple):
    """An `Attend` over a slot cache that also exposes cache and layout, for layers that attend on their own."""

    attend: Attend
    layout: TreeLayout  # where each token's key and value go, and what it sees
    keys_YSKCd: Tensor  # of all layers: Y layers, S slots, C places
    values_YSKCd: Tensor

    def __call__(self, layer: int, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> Tensor:
        return self.attend(layer, q_THd, k_TKd, v_TKd)


Rope = tuple[Tensor, Tensor]
"""cos and signed sin, see `kernels/layers/rotate`"""


class Hidden(NamedTuple):
    last_TD: Tensor  # after the final norm
    taps_TE: Tensor | None  # residual streams that enter the tapped layers, concatenated


class RmsNorm(nn.Module):
    """x / rms(x) * weight, the mean square in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, eps=self.eps)


class Layer(nn.Module):
    """Pre-norm attention and gated MLP."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        hidden, d = config.hidden_size, config.head_dim
        self.heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        self.head_dim, self.qk_norm = d, config.qk_norm
        self.input_norm = RmsNorm(hidden, config.rms_norm_eps)
        self.qkv_proj = nn.Linear(hidden, sum(self.heads) * d, bias=config.family == "qwen2")
        self.q_norm = RmsNorm(d, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RmsNorm(d, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.o_proj = nn.Linear(config.num_heads * d, hidden, bias=False)
        self.post_norm = RmsNorm(hidden, config.rms_norm_eps)
        self.gate_up_proj = nn.Linear(hidden, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, hidden, bias=False)

    def forward(self, x_TD: Tensor, rope: Rope, attend: Attend, layer: int) -> Tensor:
        heads = self.qkv_proj(self.input_norm(x_TD)).unflatten(-1, (-1, self.head_dim))
        queries, keys, values = self.heads
        qk, v_TKd = heads.split((queries + keys, values), dim=1)
        if self.qk_norm:
            q, k = qk.split((queries, keys), dim=1)
            qk = torch.cat([self.q_norm(q), self.k_norm(k)], dim=1)
        q_THd, k_TKd = rotate(qk, *rope).split((queries, keys), dim=1)  # one call: op count bounds small passes
        x_TD = x_TD + self.o_proj(attend(layer, q_THd, k_TKd, v_TKd).flatten(-2))
        return x_TD + self.down_proj(swiglu(self.gate_up_proj(self.post_norm(x_TD))))


class Decoder(nn.Module):
    """Llama, Qwen2 or Qwen3."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self._frequencies: Tensor
        self.register_buffer("_frequencies", rope_frequencies(config), persistent=False)
        # Replacements for the LM head and for all layers, see `packed`:
        self.packed_head: nn.Module | None = None
        self.packed_layers: Callable[[Tensor, Rope, PlacedAttend, Sequence[int]], Hidden] | None = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Decoder":
        """Keep the rotary frequencies in float32 when the module is cast: bfloat16 ruins positions.  Raises ModelError
        on a packed decoder, whose kernels hold addresses of the weights."""
        if self.packed_layers is not None:
            raise ModelError("a packed decoder cannot be moved or cast: load the plain one again")
        super()._apply(fn, recurse)
        self.reset_frequencies()
        return self

    def reset_frequencies(self) -> None:
        self._frequencies = rope_frequencies(self.config).to(self._frequencies.device)

    def forward(self, tokens_T: Tensor, positions_T: Tensor, attend: Attend, *, taps: Sequence[int] = ()) -> Hidden:
        """Run T tokens at the given positions.

        Tap k is the residual stream that enters layer k (num_layers: the one before the final norm).  taps_TE
        concatenates them in the given order.  Raises ValueError on a tap that does not exist.
        """
        if not all(0 <= k <= len(self.layers) for k in taps):
            raise ValueError(f"taps {tuple(taps)}: this decoder has taps 0 to {len(self.layers)}")
        x_TD = self.embed_tokens(tokens_T)
        rope = self._rope(positions_T, x_TD.dtype)
        if self.packed_layers is not None and isinstance(attend, PlacedAttend):
            return self.packed_layers(x_TD, rope, attend, taps)
        streams: list[Tensor | None] = []
        for index, layer in enumerate(self.layers):
            streams.append(x_TD if index in taps else None)
            x_TD = self.run_layer(layer, x_TD, rope, attend, index)
        streams.append(x_TD)
        tapped = [stream for k in taps if (stream := streams[k]) is not None]
        return Hidden(self.norm(x_TD), torch.cat(tapped, dim=-1) if taps else None)

    def run_layer(self, layer: nn.Module, x_TD: Tensor, rope: Rope, attend: Attend, index: int) -> Tensor:
        """One layer; training overrides this to recompute activations."""
        return layer(x_TD, rope, attend, index)

    @property
    def head_weight(self) -> Tensor:
        """LM head, [V, D]: the embedding when tied."""
        return self.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """[T, V], in the weights' dtype."""
        if self.packed_head is not None:
            return self.packed_head(hidden_TD)
        return F.linear(hidden_TD, self.head_weight)

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Overwrite parameters in place.  Raises ModelError on an unknown name or a wrong shape."""
        parameters = dict(self.named_parameters())
        for name, value in weights:
            if name not in parameters or parameters[name].shape != value.shape:
                raise ModelError(f"weight {name} of shape {tuple(value.shape)} does not fit this decoder")
            parameters[name].copy_(value)

    def _rope(self, positions_T: Tensor, dtype: torch.dtype) -> Rope:
        """cos and signed sin, [T, 1, d], computed in float32."""
        angles = positions_T.float()[:, None, None] * self._frequencies
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


def rope_frequencies(config: DecoderConfig) -> Tensor:
    """Rotary frequencies, [d / 2] float32, with Llama 3's scaling of the low ones."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    wavelengths = 2 * math.pi / frequencies
    longest = scaling.original_max_position_embeddings / scaling.low_freq_factor
    shortest = scaling.original_max_position_embeddings / scaling.high_freq_factor
    blend = (scaling.original_max_position_embeddings / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    slowed = frequencies / scaling.factor
    middle = (1 - blend) * slowed + blend * frequencies
    return torch.where(wavelengths > longest, slowed, torch.where(wavelengths < shortest, frequencies, middle))
