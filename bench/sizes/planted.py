"""Models and drafters of true shape whose behaviour is planted: what decoding costs, without weights to download.

The target's projections are random and do their work in full, but hardly move the residual stream, and the LM head is
the embedding shifted by one: after token v comes v + 1 (where head and embedding are one matrix: v again), whatever the
temperature, the batch and the rounding.  So a response is known beforehand, and no near-tie ends the comparison.

The drafter runs a real EAGLE-3 pass on random weights; then its tokens are overwritten: each is the right one with a
given chance, decided by the position's own hash, so that a run repeats.  A chain of d tokens is then accepted to

    E(d) = (1 - c^(d + 1)) / (1 - c)        tokens, the target's own among them, with chance c

Shapes: B rows, L positions, U draft tokens of a row, V vocabulary, D hidden size.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tlt_core.drafter.eagle3.drafter import Eagle3Drafter
from tlt_core.drafter.eagle3.model import Eagle3Config, Eagle3Model, blank_eagle3
from tlt_core.items.speculation import LiveView, Strategy
from tlt_core.items.static_shapes import Inputs, PaddedTree, StaticDrafting
from tlt_core.items.types import SamplingParams
from tlt_core.model.config import DecoderConfig
from tlt_core.model.decoder import Decoder
from tlt_core.model.embedded import EMBEDDED_NAME
from tlt_core.model.sampling import row_keys
from tlt_core.model.shapes import KNOWN, shape

_STD = 0.02
_QUIET = 0.01  # of what layers add to the residual stream
_BITS = 24


SHAPES = {
    "qwen2.5-7b": KNOWN["qwen2.5-7b"],
    "smollm2-135m": KNOWN[EMBEDDED_NAME],
    "tiny": shape("llama", 512, 64, 96, 2, 4, 2),
}


@torch.no_grad()
def planted_target(config: DecoderConfig, *, dtype: torch.dtype, device: torch.device) -> Decoder:
    """The target of the module docstring."""
    with torch.device("meta"):
        decoder = Decoder(config)
    decoder = decoder.to(dtype).to_empty(device=device)
    decoder.reset_frequencies()
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in decoder.named_parameters():
        if name.endswith("norm.weight"):
            parameter.fill_(1.0)
        elif name.endswith("bias"):
            parameter.zero_()
        else:
            quiet = name.endswith(("o_proj.weight", "down_proj.weight"))
            parameter.normal_(0.0, _QUIET * _STD if quiet else _STD, generator=generator)
    decoder.embed_tokens.weight.normal_(0.0, 1.0, generator=generator)
    if not config.tie_word_embeddings:
        decoder.lm_head.weight.copy_(decoder.embed_tokens.weight.roll(1, 0))
    return decoder.requires_grad_(False)


def successor(tokens: Tensor, config: DecoderConfig) -> Tensor:
    """What `planted_target` says after each token."""
    return tokens if config.tie_word_embeddings else (tokens + 1) % config.vocab_size


def random_drafter(target: DecoderConfig, *, draft_vocab: int, dtype: torch.dtype, device: torch.device) -> Eagle3Model:
    """A network of true shape, made on the device."""
    model = blank_eagle3(Eagle3Config.for_target(target, draft_vocab), dtype=dtype, device=device)
    generator = torch.Generator(device).manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, _STD, generator=generator)
        model.draft_ids_J.copy_(torch.arange(draft_vocab))
    return model


def chance_for(length: float, *, depth: int) -> float:
    """c with E(depth) = length.  Raises ValueError when no chance gives that."""
    if not 1 <= length < depth + 1:
        raise ValueError(f"chains of {depth} cannot be accepted to {length} tokens on average: choose 1 to {depth + 1}")
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**i for i in range(depth + 1)) < length else (low, middle)
    return low


class PlantedDrafter(Eagle3Drafter):
    """Drafts chains in fixed shapes, at EAGLE-3's cost, right with a given chance."""

    def __init__(
        self, model: Eagle3Model, decoder: Decoder, *, chance: float, max_live: int, max_len: int, room: int
    ) -> None:
        """chance: c; the rest as in `Eagle3Drafter`."""
        super().__init__(model, decoder, max_live=max_live, max_len=max_len, room=room)
        self._target, self._chance = decoder.config, chance

    def static(self, inputs: Inputs, strategies: Sequence[Strategy]) -> StaticDrafting:  # type: ignore[override]
        """See `static_shapes.HasStatic`.  Raises ValueError on a strategy that is not a chain."""
        if any(strategy.width > 1 for strategy in strategies):
            raise ValueError(f"acceptance is planted in chains, not in {', '.join(map(str, strategies))}: take width 1")
        return _PlantedDrafting(super().static(inputs, strategies), inputs, self._target, self._chance)


class _PlantedDrafting:
    """Passes everything on, and overwrites what was drafted."""

    def __init__(self, inner: StaticDrafting, inputs: Inputs, target: DecoderConfig, chance: float) -> None:
        self._inner, self._inputs, self._target, self._chance = inner, inputs, target, chance

    def begin(self, view: LiveView) -> None:
        self._inner.begin(view)

    def catch_up(self, rows: int) -> None:
        self._inner.catch_up(rows)

    def end(self, lengths: Sequence[int]) -> None:
        self._inner.end(lengths)

    @torch.inference_mode()
    def draft(self, rows: int, strategy: Strategy, params: SamplingParams, tree: PaddedTree) -> None:
        self._inner.draft(rows, strategy, params, tree)
        inputs, depth = self._inputs, min(strategy.depth, strategy.tokens)
        lengths_B = inputs.lengths_B[:rows]
        levels_L = torch.arange(depth, device=lengths_B.device)
        keys_BL2 = row_keys(inputs.streams_B[:rows, None], lengths_B[:, None] + levels_L)
        hit_BL = (keys_BL2[..., 0] & ((1 << _BITS) - 1)) < self._chance * (1 << _BITS)
        token_B = inputs.tokens_BC[:rows].gather(1, lengths_B[:, None] - 1)[:, 0]
        known_B = lengths_B > 1  # as in the real one: of one token no position was run
        for level in range(depth):
            token_B = successor(token_B, self._target)
            wrong_B = (token_B + 7) % self._target.vocab_size
            promised = math.log(self._chance) * (level + 1) if self._chance else -math.inf
            used_B = known_B & (level + 1 < inputs.room_B[:rows]) & (inputs.log_min_prob <= promised)
            drafted_B = torch.where(hit_BL[:, level], token_B, wrong_B)
            tree.tokens_BU[:, level] = torch.where(used_B, drafted_B, -1)
            tree.parents_BU[:, level] = torch.where(used_B, level - 1, -1)
            tree.depths_BU[:, level] = torch.where(used_B, level + 1, 0)
