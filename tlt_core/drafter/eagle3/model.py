"""EAGLE-3 drafter (Li et al., arXiv 2503.01840): one decoder layer on the target's low, middle and high hidden states.

    position t:  e = embed(x_{t+1})      g = fc(cat(h_low, h_mid, h_high)[t])            embed: the target's, frozen
                 r = g + attention(cat(input_norm(e), hidden_norm(g)))                   rotary position t
                 y = r + mlp(post_norm(r))
                 softmax(lm_head(norm(y))) over the draft vocabulary predicts x_{t+2}
    next draft:  position t+1, e = embed(drafted x_{t+2}), and y (before the norm) in the place of g

Hidden states of some targets have a few massive values (24,890 in SmolLM2-135M), on which an `fc` cannot be trained.
So each third of its input is scaled by a fixed power of two.  The same scales multiplied into fc's columns give the
same products to the bit, in any binary floating type: what is published and served is the folded `fc` alone.

Shapes: T positions, D hidden size, E = 3 D tapped width, H query heads, K key/value heads, d head size, V target
vocabulary, J draft vocabulary.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.layers.rotate import rotate
from kernels.layers.swiglu import swiglu
from tlt_core.model.config import DecoderConfig, ModelError
from tlt_core.model.decoder import Decoder, Layer, RmsNorm, rope_frequencies

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""attend(q_THd, k_TKd, v_TKd) -> out_THd"""

_INIT_STD = 0.02


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """What `Eagle3Model` is built from.  Eagle3Config(layer=..., draft_vocab_size=8192, taps=(2, 15, 27))"""

    layer: DecoderConfig  # the drafter's own layer as a llama model of one layer; vocab_size is the target's
    draft_vocab_size: int
    taps: tuple[int, ...]  # three of `Decoder.forward`'s taps, ascending

    @classmethod
    def for_target(
        cls, target: DecoderConfig, draft_vocab_size: int, *, taps: tuple[int, ...] | None = None
    ) -> "Eagle3Config":
        """A layer shaped like the target's.  Raises ModelError on taps that the target does not have."""
        layer = dataclasses.replace(target, family="llama", foreign="", num_layers=1, tie_word_embeddings=False)
        taps = default_taps(target.num_layers) if taps is None else taps
        check_taps(taps, target)
        return cls(layer, draft_vocab_size, taps)


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """The taps that vLLM and SGLang assume; first, middle and last stream where a target is too small for them.

    Raises ModelError on a target of one layer, which has only two streams.
    """
    if num_layers < 2:
        raise ModelError(
            f"an EAGLE-3 drafter taps three streams of its target, and a target of {num_layers} layer has two: use a "
            "deeper model, or leave drafter.warmup and rollout.speculation.drafter_path out (the n-gram drafter stays)"
        )
    usual = (2, num_layers // 2, num_layers - 3)
    return usual if usual[0] < usual[1] < usual[2] else (0, num_layers // 2, num_layers)


def check_taps(taps: tuple[int, ...], target: DecoderConfig) -> None:
    """Raises ModelError unless these are three ascending taps of the target."""
    if len(taps) != 3 or list(taps) != sorted(set(taps)) or not 0 <= taps[0] <= taps[-1] <= target.num_layers:
        raise ModelError(
            f"an EAGLE-3 drafter taps three ascending layer ids between 0 and {target.num_layers} of this target, got "
            f"{taps}; is it a drafter of another model?"
        )


class Eagle3Model(nn.Module):
    """The drafter's network.  The target's embedding is not part of it: the caller looks tokens up."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config, layer = config, config.layer
        size, d, eps = layer.hidden_size, layer.head_dim, layer.rms_norm_eps
        self.head_dim, self.heads = d, (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
        self.tap_scales: tuple[float, ...] = (1.0,) * len(config.taps)
        self.fc = nn.Linear(len(config.taps) * size, size, bias=False)
        self.input_norm, self.hidden_norm = RmsNorm(size, eps), RmsNorm(size, eps)
        self.qkv_proj = nn.Linear(2 * size, sum(self.heads) * d, bias=False)
        self.o_proj = nn.Linear(layer.num_heads * d, size, bias=False)
        self.post_norm = RmsNorm(size, eps)
        self.gate_up_proj = nn.Linear(size, 2 * layer.intermediate_size, bias=False)
        self.down_proj = nn.Linear(layer.intermediate_size, size, bias=False)
        self.norm = RmsNorm(size, eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.draft_ids_J: Tensor  # int64, ascending target ids of the draft vocabulary
        self.register_buffer("draft_ids_J", torch.arange(config.draft_vocab_size))

    def fuse(self, taps_TE: Tensor) -> Tensor:
        """g of the module docstring, [T, D]."""
        if any(scale != 1 for scale in self.tap_scales):
            scales = torch.tensor(self.tap_scales, dtype=taps_TE.dtype, device=taps_TE.device)
            taps_TE = (taps_TE.unflatten(-1, (len(scales), -1)) * scales[:, None]).flatten(-2)
        return self.fc(taps_TE)

    def forward(self, embeds_TD: Tensor, hidden_TD: Tensor, rope_T21d: Tensor, attend: Attend) -> Tensor:
        """y of the module docstring, [T, D].  hidden: g, or y of the position before.  rope: from `rope_table`."""
        queries, keys, values = self.heads
        x = self.qkv_proj(self._attention_input(embeds_TD, hidden_TD)).unflatten(-1, (-1, self.head_dim))
        qk, v_TKd = x.split((queries + keys, values), dim=1)
        q_THd, k_TKd = rotate(qk, rope_T21d[:, 0], rope_T21d[:, 1]).split((queries, keys), dim=1)
        r_TD = hidden_TD + self.o_proj(attend(q_THd, k_TKd, v_TKd).flatten(-2))
        return r_TD + self.down_proj(swiglu(self.gate_up_proj(self.post_norm(r_TD))))

    def keys_values(self, embeds_TD: Tensor, hidden_TD: Tensor, rope_T21d: Tensor) -> tuple[Tensor, Tensor]:
        """What `forward` gives `attend` as keys and values, [T, K, d] each, and nothing else of it; differentiable.

        For plain weights, see `model/packed.py`.
        """
        queries, keys, values = self.heads
        weight = self.qkv_proj.weight[queries * self.head_dim :]
        x = F.linear(self._attention_input(embeds_TD, hidden_TD), weight).unflatten(-1, (-1, self.head_dim))
        k_TKd, v_TKd = x.split((keys, values), dim=1)
        return rotate(k_TKd, rope_T21d[:, 0], rope_T21d[:, 1]), v_TKd

    def logits(self, y_TD: Tensor) -> Tensor:
        """[T, J], in the weights' dtype."""
        return self.lm_head(self.norm(y_TD))

    def _attention_input(self, embeds_TD: Tensor, hidden_TD: Tensor) -> Tensor:
        return torch.cat([self.input_norm(embeds_TD), self.hidden_norm(hidden_TD)], dim=-1)


def rope_table(config: Eagle3Config, length: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """cos and signed sin of positions 0 .. length-1 in half-split layout, [length, 2, 1, d], computed in float32."""
    angles = torch.arange(length).float()[:, None] * rope_frequencies(config.layer)
    cos, sin = angles.cos(), angles.sin()
    table = torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], dim=1)
    return table[:, :, None].to(device, dtype)


def tap_scales(taps_TE: Tensor) -> tuple[float, ...]:
    """A power of two for each third of the taps that brings its usual size near one.

    The median over tokens: massive activations sit on very few of them.
    """
    rms_3 = taps_TE.float().unflatten(-1, (3, -1)).square().mean(-1).sqrt().median(dim=0).values
    return tuple(2.0 ** -round(math.log2(max(rms, 1e-6))) for rms in rms_3.tolist())


def choose_draft_vocabulary(
    counts_V: Tensor, size: int, *, always: Sequence[int], prompt_counts_V: Tensor | None = None
) -> Tensor:
    """Target ids that the drafter may propose: the `size` most frequent, with `always` (the stop tokens) among them.

    counts_V: how often the policy's own responses used each token.  Of equals those go first that the prompts use more
    (responses repeat what they are asked), then the lower id, which in a BPE vocabulary is the more frequent one.
    Returns [size] int64, ascending.  Raises ValueError when the size does not fit.
    """
    if not len(set(always)) <= size <= len(counts_V):
        raise ValueError(
            f"a draft vocabulary of {size} tokens does not fit: it holds {len(set(always))} stop tokens and is a part "
            f"of the target's {len(counts_V)}"
        )
    ranked = counts_V.to(torch.float64, copy=True)
    if prompt_counts_V is not None:
        ranked += prompt_counts_V / (1.0 + prompt_counts_V.sum().double())  # below 1 together: ties alone are broken
    ranked[torch.tensor(list(always), dtype=torch.int64)] = torch.inf
    return ranked.argsort(descending=True, stable=True)[:size].sort().values


def blank_eagle3(config: Eagle3Config, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> Eagle3Model:
    """Memory without values, and without a draw from torch's global generator."""
    with torch.device("meta"):
        model = Eagle3Model(config)
    return model.to(dtype).to_empty(device=device)


def random_eagle3(config: Eagle3Config, draft_ids_J: Tensor, *, seed: int) -> Eagle3Model:
    """Normally distributed float32 weights, from the seed alone."""
    model = blank_eagle3(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, _INIT_STD, generator=generator)
        model.draft_ids_J.copy_(draft_ids_J)
    return model


@torch.no_grad()
def eagle3_from_target(
    decoder: Decoder, draft_ids_J: Tensor, *, scales: tuple[float, ...], taps: tuple[int, ...] | None = None, seed: int
) -> Eagle3Model:
    """A float32 drafter, on the target's device, that starts as the target's last layer on its high hidden state (at
    random where transformers computes the target).

    `fc` passes the scaled high state through, so what the layer adds to it is scaled likewise (norms do not see scale).
    The embedding's half of query, key and value starts random and small: the target has nothing like it.  `decoder`
    must hold plain weights, see `model/packed.py`.  scales: from `tap_scales`.
    """
    config = Eagle3Config.for_target(decoder.config, len(draft_ids_J), taps=taps)
    model = random_eagle3(config, draft_ids_J.cpu(), seed=seed)
    model.tap_scales = scales
    head = decoder.head_weight
    model.lm_head.weight.copy_(head[draft_ids_J.to(head.device)])
    if decoder.config.foreign:  # its layers are of another make, and the drafter's begins at random
        return model.to(head.device)
    last, size = decoder.layers[-1], config.layer.hidden_size
    assert isinstance(last, Layer), "a decoder's layers are Layers"
    assert isinstance(last.qkv_proj, nn.Linear), "the decoder's weights are packed: take them from the plain one"
    model.fc.weight[:, -size:] += torch.eye(size)
    model.hidden_norm.weight.copy_(last.input_norm.weight)
    model.qkv_proj.weight[:, size:] = last.qkv_proj.weight.to("cpu", torch.float32)
    model.o_proj.weight.copy_(last.o_proj.weight.float() * scales[-1])
    model.post_norm.weight.copy_(last.post_norm.weight)
    model.gate_up_proj.weight.copy_(last.gate_up_proj.weight)
    model.down_proj.weight.copy_(last.down_proj.weight.float() * scales[-1])
    model.norm.weight.copy_(decoder.norm.weight)
    return model.to(head.device)
