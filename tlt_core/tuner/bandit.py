"""TLT's bucketed epsilon-greedy bandit, kept for comparison with the cost model.

    bucket = largest threshold <= live requests;   reward = tokens emitted / seconds of the round
    with probability epsilon any strategy, else the one with the largest median reward in its window; untried ones first

It differs from TLT's released code in three ways.  Every bucket holds all strategies and plain decoding (there: one
strategy, so nothing is explored).  A strategy starts without rewards (there: with rewards of 0).  The random generator
is the bandit's own.
"""

import random
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tlt_core.items.speculation import OFF, RoundReport, Strategy

_THRESHOLDS = (1, 2, 3, 5, 9, 17, 33)  # live requests: powers of two, as in TLT
_WINDOW = 300  # rewards of a strategy, as in TLT
EPSILON = 0.1  # share of explored rounds, as in TLT


class _Window:
    """The latest rewards of a strategy, and their median."""

    def __init__(self, values: Sequence[float] = ()) -> None:
        self.values: deque[float] = deque(values, maxlen=_WINDOW)
        self._ordered = sorted(self.values)

    def add(self, value: float) -> None:
        if len(self.values) == self.values.maxlen:
            self._ordered.pop(bisect_left(self._ordered, self.values[0]))
        self.values.append(value)
        insort(self._ordered, value)

    def median(self) -> float:
        """Infinite before the first reward."""
        n = len(self._ordered)
        if not n:
            return float("inf")
        return 0.5 * (self._ordered[(n - 1) // 2] + self._ordered[n // 2])


class BucketedGreedy:
    """The bandit alone: `pick` a strategy, `reward` it."""

    def __init__(self, strategies: Sequence[Strategy], *, seed: int, epsilon: float = EPSILON) -> None:
        self._strategies = (OFF, *strategies)
        self._epsilon, self._random = epsilon, random.Random(seed)
        self._windows = [{strategy: _Window() for strategy in self._strategies} for _ in _THRESHOLDS]

    def pick(self, live: int, *, without: Collection[str] = ()) -> Strategy:
        """A strategy for a batch of `live` requests that uses none of the drafters in `without`."""
        allowed = [strategy for strategy in self._strategies if strategy.drafter not in without]
        if self._random.random() < self._epsilon:
            return self._random.choice(allowed)
        windows = self._windows[self._bucket(live)]
        return max(allowed, key=lambda strategy: windows[strategy].median())

    def reward(self, report: RoundReport) -> None:
        """Learn from a round."""
        windows = self._windows[self._bucket(report.live)]
        if report.strategy in windows:
            tokens = report.live + sum(report.accepted)
            windows[report.strategy].add(tokens / max(report.draft_s + report.backlog_s + report.verify_s, 1e-9))

    def clear(self, drafter: str | None) -> None:
        """Forget the rewards of a drafter (None: of all)."""
        for windows in self._windows:
            for strategy in windows:
                if drafter in (None, strategy.drafter):
                    windows[strategy] = _Window()

    def state_dict(self) -> dict[str, Any]:
        """As JSON values."""
        version, words, gauss = self._random.getstate()
        rewards = {
            str(threshold): {str(strategy): list(window.values) for strategy, window in windows.items()}
            for threshold, windows in zip(_THRESHOLDS, self._windows, strict=True)
        }
        return {"random": [version, list(words), gauss], "rewards": rewards}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Buckets and strategies that no longer exist are dropped."""
        version, words, gauss = state["random"]
        self._random.setstate((version, tuple(words), gauss))
        for threshold, windows in zip(_THRESHOLDS, self._windows, strict=True):
            saved = state["rewards"].get(str(threshold), {})
            for strategy in windows:
                windows[strategy] = _Window(saved.get(str(strategy), ()))

    def _bucket(self, live: int) -> int:
        return max(i for i, threshold in enumerate(_THRESHOLDS) if threshold <= live)
