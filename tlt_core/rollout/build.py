"""Builds what an engine speculates with from the configuration: drafters, tuner, menu.

The tuner's costs are measured on the engine's own decoder before the first round (`calibrate`), a few seconds.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tlt_core.drafter.eagle3.drafter import Eagle3Drafter
from tlt_core.drafter.eagle3.files import load_eagle3
from tlt_core.drafter.eagle3.static import room_for
from tlt_core.drafter.ngram.drafter import NgramDrafter
from tlt_core.items.speculation import Drafter, Strategy
from tlt_core.model.decoder import Decoder
from tlt_core.rollout.engine import RolloutEngine, Speculation
from tlt_core.tuner.policies import RecordedTuner, make_tuner

if TYPE_CHECKING:  # benchmarks on a bare machine calibrate without pydantic
    from conf.rollout import SpeculationConfig

_CALIBRATION_S = 3.0
# Few strategies: each is tried before it is trusted, and the tuner's floors shorten deep drafts (`Floors`).
_NGRAM_MENU = (
    Strategy("ngram", 2, 1, 2),
    Strategy("ngram", 4, 1, 4),
    Strategy("ngram", 8, 1, 8),
)
_EAGLE3_MENU = (
    Strategy("eagle3", 2, 1, 2),  # a cheap probe: it finds a drafter that is good again
    Strategy("eagle3", 4, 1, 4),
    Strategy("eagle3", 7, 1, 7),
)
# On a CPU every verified token costs time: no tree has paid there, and trying one costs time.
_GPU_TREES = (Strategy("eagle3", 5, 2, 8),)


def menu_of(cfg: SpeculationConfig, *, on_gpu: bool = False) -> tuple[Strategy, ...]:
    """The configured strategies, or a few for each drafter at hand."""
    if cfg.menu is not None:
        return tuple(Strategy(s.drafter, s.depth, s.width, s.tokens) for s in cfg.menu)
    if cfg.drafter_path is None:
        return _NGRAM_MENU
    return _EAGLE3_MENU + (_GPU_TREES if on_gpu else ()) + _NGRAM_MENU


def make_engine(
    decoder: Decoder,
    cfg: SpeculationConfig,
    *,
    max_live: int,
    max_len: int,
    seed: int,
    capture: bool = False,
    static: bool | None = None,
    kv_memory_fraction: float = 0.9,
) -> RolloutEngine:
    """An engine that speculates as configured.  Raises ModelError when the drafter does not fit the decoder.

    capture: keep the hidden states that an EAGLE-3 drafter is trained on; without such a drafter nothing is kept.
    static, kv_memory_fraction: see `RolloutEngine`.
    """
    if cfg.policy == "off":
        return RolloutEngine(
            decoder, max_live=max_live, max_len=max_len, static=static, kv_memory_fraction=kv_memory_fraction
        )
    menu = menu_of(cfg, on_gpu=decoder.head_weight.is_cuda)
    used = {strategy.drafter for strategy in menu}
    drafters: dict[str, Drafter] = {}
    if "ngram" in used:
        drafters["ngram"] = NgramDrafter(max_index_tokens=cfg.ngram.max_index_tokens, min_match=cfg.ngram.min_match)
    if "eagle3" in used:
        assert cfg.drafter_path is not None, "the configuration was checked"
        network = load_eagle3(Path(cfg.drafter_path), decoder.config)
        room = room_for([s for s in menu if s.drafter == "eagle3"])
        drafters["eagle3"] = Eagle3Drafter(network, decoder, max_live=max_live, max_len=max_len, room=room)
    tuner = make_tuner(cfg.policy, menu, seed=seed)
    return RolloutEngine(
        decoder,
        max_live=max_live,
        max_len=max_len,
        speculation=Speculation(drafters, tuner, menu),
        capture_taps=drafters["eagle3"].taps if capture and "eagle3" in drafters else (),
        static=static,
        kv_memory_fraction=kv_memory_fraction,
    )


def calibrate(engine: RolloutEngine) -> None:
    """Time a few passes of the engine's decoder for a tuner that uses their costs.  No request may be live."""
    if engine.speculation is None or not isinstance(engine.speculation.tuner, RecordedTuner):
        return
    largest = max(s.tokens for s in engine.speculation.menu)

    def measure(live: int, tokens: int, context: int) -> float:
        tokens = min(tokens, live * (1 + largest))
        return engine.rehearse(live, tokens, context // live)

    measure(1, 1 + largest, 64)  # the first pass of a shape pays for set-up
    engine.speculation.tuner.calibrate(
        measure, max_live=engine.max_live, max_tokens=engine.max_live * (1 + largest), budget_s=_CALIBRATION_S
    )


def snapshot(engine: RolloutEngine) -> dict[str, Any]:
    """The tuner's figures for metrics (`RecordedTuner.snapshot`); empty without a tuner."""
    if engine.speculation is None or not isinstance(engine.speculation.tuner, RecordedTuner):
        return {}
    return engine.speculation.tuner.snapshot()
