"""How much training in idle time slows workers that still decode: rounds during training against rounds in a pause.

Workers on one machine share its memory, caches and clock, so an idle worker that trains can slow a busy one.  Rounds of
one shape (strategy and number of live requests) are compared within a phase.  Let x be the logarithm of a round's
seconds, and let shape k have n_k rounds during training and m_k rounds in a pause:

    slowdown = exp(D) - 1      D = sum_k w_k (mean x during training - mean x in a pause) / sum_k w_k
                               w_k = n_k m_k / (n_k + m_k)      var D = s^2 / sum_k w_k

Here s^2 is the variance of x within shape and side.  A round counts when it lies wholly on one side and began after
the first worker ran out of work: before that, nobody could have trained.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

from tlt_core.items.types import WorkerSpan, WorkerState

_LEAST_FREEDOM = 8  # below it the variance within shape and side is a guess


class TimedRound(NamedTuple):
    """One decode round.  TimedRound(shape=("eagle3", 4, 1, 2), end_s=1700000000.1, seconds=0.03)"""

    shape: Hashable
    end_s: float  # of the clock of the spans
    seconds: float


class PaceSums(NamedTuple):
    """Sums that add up over phases."""

    weight: float = 0.0  # sum of w
    weighted: float = 0.0  # ... of w times the difference
    squares: float = 0.0  # of x about its mean, within shape and side
    freedom: float = 0.0  # rounds less the means taken of them

    def plus(self, other: "PaceSums", *, keep: float = 1.0) -> "PaceSums":
        """Both together; `keep` of these."""
        return PaceSums(*(keep * a + b for a, b in zip(self, other, strict=True)))

    def difference(self) -> tuple[float, float]:
        """D and its standard error; infinite where too little was measured on both sides."""
        if self.weight <= 0 or self.freedom < _LEAST_FREEDOM:
            return 0.0, math.inf
        return self.weighted / self.weight, math.sqrt(self.squares / self.freedom / self.weight)


def pace(rounds: Mapping[int, Sequence[TimedRound]], spans: Iterable[WorkerSpan]) -> PaceSums:
    """Of one phase.  rounds: by worker.  spans: of all workers in it."""
    spans = list(spans)
    total = PaceSums()
    for worker, own in rounds.items():
        others = [s for s in spans if s.worker != worker]
        training = _union([s for s in others if s.state == WorkerState.TRAINING])
        streaming = _union([s for s in others if s.state == WorkerState.STREAMING])
        first_idle_s = min((s.start_s for s in others if s.state != WorkerState.BUSY), default=math.inf)
        sides: defaultdict[Hashable, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
        for shape, end_s, seconds in own:
            beside_s = _overlap(training, end_s - seconds, end_s)
            if seconds <= 0 or end_s - seconds < first_idle_s or 0 < beside_s < seconds * (1 - 1e-6):
                continue
            if _overlap(streaming, end_s - seconds, end_s) > 0:
                continue
            sides[shape][beside_s == 0].append(math.log(seconds))
        for beside, pausing in sides.values():
            total = total.plus(_sums(beside, pausing))
    return total


def beside_s(spans: Iterable[WorkerSpan], states: Collection[WorkerState], *, until_s: float) -> float:
    """Seconds up to until_s in which at least one worker was in one of these states."""
    return _overlap(_union([s for s in spans if s.state in states]), -math.inf, until_s)


def _sums(beside: Sequence[float], pausing: Sequence[float]) -> PaceSums:
    if not beside or not pausing:
        return PaceSums()
    means = [sum(side) / len(side) for side in (beside, pausing)]
    squares = sum((x - mean) ** 2 for side, mean in zip((beside, pausing), means, strict=True) for x in side)
    weight = len(beside) * len(pausing) / (len(beside) + len(pausing))
    return PaceSums(weight, weight * (means[0] - means[1]), squares, len(beside) + len(pausing) - 2)


def _union(spans: Iterable[WorkerSpan]) -> list[tuple[float, float]]:
    """Intervals in order, without overlap."""
    merged: list[tuple[float, float]] = []
    for start_s, end_s in sorted((s.start_s, s.end_s) for s in spans):
        if merged and start_s <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end_s)
        else:
            merged.append((start_s, end_s))
    return merged


def _overlap(intervals: Iterable[tuple[float, float]], start_s: float, end_s: float) -> float:
    return sum(max(0.0, min(end, end_s) - max(start, start_s)) for start, end in intervals)
