"""The kinds of drafters, by the names that a configuration gives them.  The rest of the code asks for their properties.

A learned kind is a network with weights of its own: `drafter_path` names its folder, and idle workers train it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tlt_core.drafter.eagle3.drafter import Eagle3Drafter
from tlt_core.drafter.eagle3.files import load_eagle3
from tlt_core.drafter.eagle3.static import room_for
from tlt_core.drafter.ngram.drafter import NgramDrafter
from tlt_core.items.speculation import Drafter, Strategy
from tlt_core.model.decoder import Decoder

if TYPE_CHECKING:  # benchmarks on a bare machine have no pydantic
    from conf.rollout import SpeculationConfig

_NGRAM_MATCH = 3  # longest suffix that vLLM looks up


class DrafterKind(NamedTuple):
    """Few strategies: each is tried before it is trusted, and `MinDraftProbs` shortens deep drafts."""

    learned: bool
    strategies: tuple[Strategy, ...]  # where the configuration names none
    gpu_strategies: tuple[Strategy, ...]  # besides, on a GPU
    make: Callable[[SpeculationConfig, Decoder, Sequence[Strategy], int, int], Drafter]  # see `_eagle3`
    for_vllm: Callable[[SpeculationConfig], dict[str, Any]]  # in vLLM's speculative_config


def _eagle3(
    cfg: SpeculationConfig, decoder: Decoder, strategies: Sequence[Strategy], max_live: int, max_len: int
) -> Drafter:
    """strategies: of this drafter.  Raises ModelError when the drafter does not fit the decoder."""
    assert cfg.drafter_path is not None, "the configuration was checked"
    network = load_eagle3(Path(cfg.drafter_path), decoder.config)
    return Eagle3Drafter(network, decoder, max_live=max_live, max_len=max_len, room=room_for(strategies))


def _eagle3_for_vllm(cfg: SpeculationConfig) -> dict[str, Any]:
    return {"method": "eagle3", "model": str(Path(str(cfg.drafter_path)).absolute())}


def _ngram(cfg: SpeculationConfig, *_: object) -> Drafter:
    return NgramDrafter(max_index_tokens=cfg.ngram.max_index_tokens, min_match=cfg.ngram.min_match)


def _ngram_for_vllm(cfg: SpeculationConfig) -> dict[str, Any]:
    shortest = cfg.ngram.min_match
    longest = max(shortest, _NGRAM_MATCH)
    return {"method": "ngram", "prompt_lookup_min": shortest, "prompt_lookup_max": longest}


KINDS = {
    Eagle3Drafter.name: DrafterKind(
        learned=True,
        strategies=(
            Strategy(Eagle3Drafter.name, 2, 1, 2),  # a cheap probe: it finds a drafter that is good again
            Strategy(Eagle3Drafter.name, 4, 1, 4),
            Strategy(Eagle3Drafter.name, 7, 1, 7),
        ),
        # On a CPU every verified token costs time: no tree has paid there, and trying one costs time.
        gpu_strategies=(Strategy(Eagle3Drafter.name, 5, 2, 8),),
        make=_eagle3,
        for_vllm=_eagle3_for_vllm,
    ),
    NgramDrafter.name: DrafterKind(
        learned=False,
        strategies=(
            Strategy(NgramDrafter.name, 2, 1, 2),
            Strategy(NgramDrafter.name, 4, 1, 4),
            Strategy(NgramDrafter.name, 8, 1, 8),
        ),
        gpu_strategies=(),
        make=_ngram,
        for_vllm=_ngram_for_vllm,
    ),
}


def strategies_of(cfg: SpeculationConfig, *, on_gpu: bool = False) -> tuple[Strategy, ...]:
    """The configured strategies, or a few for each drafter at hand, learned ones first."""
    if cfg.strategies is not None:
        return tuple(Strategy(s.drafter, s.depth, s.width, s.tokens) for s in cfg.strategies)
    at_hand = [kind for kind in KINDS.values() if cfg.drafter_path is not None or not kind.learned]
    return tuple(s for kind in at_hand for s in (*kind.strategies, *(kind.gpu_strategies if on_gpu else ())))


def learned_in(strategies: Sequence[Strategy]) -> list[str]:
    """Names of the learned drafters that these strategies use."""
    return [name for name, kind in KINDS.items() if kind.learned and any(s.drafter == name for s in strategies)]
