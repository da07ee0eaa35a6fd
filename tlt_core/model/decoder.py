"""The decoder: one implementation for rollout, verification and training.

Works on T tokens back to back; who attends to whom is the caller's `attend` (a KV cache in rollout, packed causal in
training), so the decoder has never heard of caches or padding.  Query-key-value and gate-up projections are fused.

Shapes: T tokens, D hidden size, H query heads, K key/value heads, d head size, V vocabulary, E tapped width.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tlt_core.model.config import DecoderConfig, ModelError

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""attend(layer, q_THd, k_TKd, v_TKd) -> out_THd"""


class Hidden(NamedTuple):
    """Result of a forward pass."""

    last_TD: Tensor  # after the final norm
    taps_TE: Tensor | None  # residual streams entering the tapped layers, side by side


class RmsNorm(nn.Module):
    """x / rms(x) * weight, the mean square in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Layer(nn.Module):
    """Pre-norm attention and gated MLP."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        hidden, d = config.hidden_size, config.head_dim
        self.sizes = (config.num_heads * d, config.num_kv_heads * d, config.num_kv_heads * d)
        self.head_dim = d
        self.input_norm = RmsNorm(hidden, config.rms_norm_eps)
        self.qkv_proj = nn.Linear(hidden, sum(self.sizes), bias=config.qkv_bias)
        self.q_norm = RmsNorm(d, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RmsNorm(d, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.o_proj = nn.Linear(self.sizes[0], hidden, bias=False)
        self.post_norm = RmsNorm(hidden, config.rms_norm_eps)
        self.gate_up_proj = nn.Linear(hidden, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, hidden, bias=False)

    def forward(self, x_TD: Tensor, rope: tuple[Tensor, Tensor], attend: Attend, layer: int) -> Tensor:
        """Residual stream in, residual stream out."""
        q, k, v = self.qkv_proj(self.input_norm(x_TD)).split(self.sizes, dim=-1)
        q_THd = _rotate(self.q_norm(q.unflatten(-1, (-1, self.head_dim))), rope)
        k_TKd = _rotate(self.k_norm(k.unflatten(-1, (-1, self.head_dim))), rope)
        x_TD = x_TD + self.o_proj(attend(layer, q_THd, k_TKd, v.unflatten(-1, (-1, self.head_dim))).flatten(-2))
        gate, up = self.gate_up_proj(self.post_norm(x_TD)).chunk(2, dim=-1)
        return x_TD + self.down_proj(F.silu(gate) * up)


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
        self.register_buffer("_frequencies", rope_frequencies(config), persistent=False)

    def reset_frequencies(self) -> None:
        """Recompute the rotary frequencies in float32: casting the module casts them too, which ruins positions."""
        self._frequencies = rope_frequencies(self.config).to(self._frequencies.device)

    def forward(self, tokens_T: Tensor, positions_T: Tensor, attend: Attend, *, taps: Sequence[int] = ()) -> Hidden:
        """Run T tokens at the given positions.  Tap k is the residual stream entering layer k (num_layers: the one
        before the final norm)."""
        x_TD = self.embed_tokens(tokens_T)
        rope = self._rope(positions_T, x_TD.dtype)
        tapped = []
        for index, layer in enumerate(self.layers):
            if index in taps:
                tapped.append(x_TD)
            x_TD = self.run_layer(layer, x_TD, rope, attend, index)
        if len(self.layers) in taps:
            tapped.append(x_TD)
        return Hidden(self.norm(x_TD), torch.cat(tapped, dim=-1) if tapped else None)

    def run_layer(
        self, layer: nn.Module, x_TD: Tensor, rope: tuple[Tensor, Tensor], attend: Attend, index: int
    ) -> Tensor:
        """One layer; training overrides this to recompute activations."""
        return layer(x_TD, rope, attend, index)

    @property
    def head_weight(self) -> Tensor:
        """LM head, [V, D]: the embedding when tied."""
        return self.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """[T, V], in the weights' dtype."""
        return F.linear(hidden_TD, self.head_weight)

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Overwrite parameters in place.  Raises ModelError on an unknown name or a wrong shape."""
        parameters = dict(self.named_parameters())
        for name, value in weights:
            if name not in parameters or parameters[name].shape != value.shape:
                raise ModelError(f"weight {name} of shape {tuple(value.shape)} does not fit this decoder")
            parameters[name].copy_(value)

    def _rope(self, positions_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin, [T, 1, d], computed in float32."""
        angles = positions_T.float()[:, None] * self._frequencies
        angles = torch.cat([angles, angles], dim=-1)[:, None]
        return angles.cos().to(dtype), angles.sin().to(dtype)


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


def _rotate(x_THd: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding in the half-split layout of Hugging Face checkpoints."""
    cos, sin = rope
    first, second = x_THd.chunk(2, dim=-1)
    return x_THd * cos + torch.cat([-second, first], dim=-1) * sin
