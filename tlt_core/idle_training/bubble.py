"""How much of the rollout phase's idle time was used: `idle/*`.

A worker's idle window begins with its last response and ends when rollout has ended everywhere.  In it the worker is
IDLE, TRAINING or STREAMING.
"""

import math
from collections.abc import Mapping, Sequence

from tlt_core.items.types import WorkerSpan, WorkerState

_USED = (WorkerState.TRAINING, WorkerState.STREAMING)
_LONG_S = 0.5  # shorter windows do not count in the ratio: they hardly hold a micro-step


def bubble(
    spans: Sequence[WorkerSpan],
    *,
    over_s: float,
    preempt_s: Sequence[float] = (),
    idle_by_reason_s: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Metrics of one phase, see `coordinator.PhaseReport` for the arguments.

    `idle/idle_s` and `idle/harvested_s`: worker seconds without requests, and those of them that were used.
    `idle/streamed_s`: those that computed passes of the policy update; the other used ones trained the drafter.
    `idle/long_idle_s`: the part of them in windows longer than 0.5 s.
    `idle/harvested_ratio`: used share of that, absent without such windows.
    `idle/preempt_ms_p95`: from the end of rollout until a working worker had stopped; absent when none worked.
    `idle/untrained_s/REASON`: unused idle worker seconds, by reason.
    """
    windows = _idle_windows(spans, over_s)
    long = [(idle, trained) for idle, trained in windows if idle > _LONG_S]
    long_idle, long_trained = (sum(column) for column in zip(*long, strict=True)) if long else (0.0, 0.0)
    streaming = (s for s in spans if s.state == WorkerState.STREAMING)
    metrics = {
        "idle/streamed_s": sum(max(min(s.end_s, over_s) - s.start_s, 0.0) for s in streaming),
        "idle/idle_s": sum(idle for idle, _ in windows),
        "idle/harvested_s": sum(trained for _, trained in windows),
        "idle/long_idle_s": long_idle,
    }
    if long:
        metrics["idle/harvested_ratio"] = long_trained / long_idle
    if preempt_s:
        rank = math.ceil(0.95 * len(preempt_s)) - 1
        metrics["idle/preempt_ms_p95"] = 1000 * sorted(preempt_s)[rank]
    untrained = {reason: s for reason, s in (idle_by_reason_s or {}).items() if reason not in ("training", "streaming")}
    return metrics | {f"idle/untrained_s/{reason}": seconds for reason, seconds in untrained.items()}


def _idle_windows(spans: Sequence[WorkerSpan], over_s: float) -> list[tuple[float, float]]:
    """Seconds, and used seconds, of each stretch in which a worker had no request."""
    windows: list[tuple[float, float]] = []
    worker = None
    for span in sorted(spans, key=lambda s: (s.worker, s.start_s, s.end_s)):
        seconds = max(min(span.end_s, over_s) - span.start_s, 0.0)
        if span.state not in (WorkerState.IDLE, *_USED):
            worker = None
            continue
        if span.worker != worker:
            windows.append((0.0, 0.0))
        worker = span.worker
        idle, trained = windows[-1]
        windows[-1] = (idle + seconds, trained + (seconds if span.state in _USED else 0.0))
    return windows
