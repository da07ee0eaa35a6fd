"""Builds what an engine speculates with from the configuration: drafters, tuner, engine.

The tuner's costs are measured on the engine's own decoder before the first round (`calibrate`), a few seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tlt_core.drafter.kinds import KINDS, strategies_of
from tlt_core.items.speculation import Drafter
from tlt_core.model.decoder import Decoder
from tlt_core.rollout.engine import RolloutEngine, Speculation
from tlt_core.tuner.policies import RecordedTuner, make_tuner

if TYPE_CHECKING:  # benchmarks on a bare machine calibrate without pydantic
    from conf.rollout import SpeculationConfig

_CALIBRATION_S = 3.0


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

    capture: keep the hidden states that a learned drafter is trained on; without such a drafter nothing is kept.
    static, kv_memory_fraction: see `RolloutEngine`.
    """
    off = cfg.policy == "off"
    strategies = () if off else strategies_of(cfg, on_gpu=decoder.head_weight.is_cuda)
    drafters: dict[str, Drafter] = {}
    for name in dict.fromkeys(strategy.drafter for strategy in strategies):
        own = [strategy for strategy in strategies if strategy.drafter == name]
        drafters[name] = KINDS[name].make(cfg, decoder, own, max_live, max_len)
    return RolloutEngine(
        decoder,
        max_live=max_live,
        max_len=max_len,
        speculation=None if off else Speculation(drafters, make_tuner(cfg.policy, strategies, seed=seed), strategies),
        capture_taps=next((d.taps for d in drafters.values() if capture and d.taps), ()),
        static=static,
        kv_memory_fraction=kv_memory_fraction,
    )


def calibrate(engine: RolloutEngine) -> None:
    """Time a few passes of the engine's decoder for a tuner that uses their costs.  No request may be live."""
    if engine.speculation is None or not isinstance(engine.speculation.tuner, RecordedTuner):
        return
    largest = max(s.tokens for s in engine.speculation.strategies)

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
