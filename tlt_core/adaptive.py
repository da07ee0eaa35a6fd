"""Builds what an engine speculates with from the configuration: drafters, tuner, menu.

The tuner's costs are measured on the engine's own decoder before the first round (`calibrate`), a few seconds.
"""

import time
from typing import Any

import torch

from conf.schema import SpeculationConfig
from tlt_core.drafter.ngram import NgramDrafter
from tlt_core.rollout.engine import RolloutEngine, Speculation
from tlt_core.speculation import Drafter, Strategy
from tlt_core.tuner.policies import RecordedTuner, make_tuner

_CALIBRATION_S = 3.0


def strategies(cfg: SpeculationConfig) -> tuple[Strategy, ...]:
    """The menu as the engine knows it."""
    return tuple(Strategy(s.drafter, s.depth, s.width, s.tokens) for s in cfg.menu)


def make_speculation(cfg: SpeculationConfig, *, seed: int) -> Speculation | None:
    """None where the configuration says `off`."""
    if cfg.policy == "off":
        return None
    menu = strategies(cfg)
    drafters: dict[str, Drafter] = {}
    if any(s.drafter == "ngram" for s in menu):
        drafters["ngram"] = NgramDrafter(max_index_tokens=cfg.ngram.max_index_tokens, min_match=cfg.ngram.min_match)
    return Speculation(drafters, make_tuner(cfg.policy, menu, max_live=cfg.max_live, seed=seed), menu)


def calibrate(engine: RolloutEngine) -> None:
    """Time a few passes of the engine's decoder, for a tuner that wants to know.  The engine must be empty."""
    if engine.speculation is None or not isinstance(engine.speculation.tuner, RecordedTuner):
        return

    largest = max(s.tokens for s in engine.speculation.menu)

    def measure(live: int, tokens: int, context: int) -> float:
        tokens = min(tokens, live * (1 + largest))
        started_s = time.perf_counter()
        engine.rehearse(live, tokens, context // live)
        if engine.decoder.head_weight.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - started_s

    measure(1, 1 + largest, 64)  # the first pass of a shape pays for set-up
    engine.speculation.tuner.calibrate(
        measure, max_live=engine.max_live, max_tokens=engine.max_live * (1 + largest), budget_s=_CALIBRATION_S
    )


def snapshot(engine: RolloutEngine) -> dict[str, Any]:
    """What the tuner knows of itself; empty without one."""
    if engine.speculation is None or not isinstance(engine.speculation.tuner, RecordedTuner):
        return {}
    return engine.speculation.tuner.snapshot()
