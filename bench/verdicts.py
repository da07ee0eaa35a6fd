"""Summaries and verdicts of benchmarks: medians with their range, claims with their bounds."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any


def summarise(measured: Sequence[Mapping[str, float]], names: Sequence[str] | None = None) -> dict[str, Any]:
    """Median, min and max of each figure; a missing one counts as 0.  names: None: the figures of the first run."""
    summary = {}
    for name in measured[0] if names is None else names:
        values = [m.get(name, 0.0) for m in measured]
        summary[name] = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return summary


def verdict(claim: str, values: Sequence[float], bound: float, *, at_most: bool = False) -> dict[str, Any]:
    """Compare the median with its bound: at least, or at most."""
    value = statistics.median(values)
    holds = value <= bound if at_most else value >= bound
    return {"claim": claim, "value": value, "spread": [min(values), max(values)], "bound": bound, "holds": holds}
