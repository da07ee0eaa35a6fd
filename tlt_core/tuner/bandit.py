"""TLT's bucketed epsilon-greedy bandit, kept for comparison with the cost model.

    bucket = largest threshold <= live requests;  reward = tokens emitted / seconds of the round
    with probability epsilon any arm, otherwise the arm with the largest median reward in its window; unseen arms first

Unlike the released code each bucket holds every arm and OFF (there each has one arm and never explores), the reward is
the round's own from its first one (there an arm starts with rewards of 0), and the generator is the tuner's.
"""

import random
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tlt_core.speculation import OFF, RoundReport, Strategy


class _Window:
    """The latest rewards of an arm, and their median."""

    def __init__(self, size: int, values: Sequence[float] = ()) -> None:
        self.values: deque[float] = deque(values, maxlen=size)
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
    """The bandit alone: `pick` an arm, `reward` it."""

    def __init__(
        self, menu: Sequence[Strategy], *, thresholds: Sequence[int], epsilon: float, window: int, seed: int
    ) -> None:
        """thresholds: ascending, the first one 1."""
        if list(thresholds) != sorted(set(thresholds)) or not thresholds or thresholds[0] != 1:
            raise ValueError(f"thresholds {tuple(thresholds)} must ascend from 1")
        self._arms = (OFF, *menu)
        self._thresholds, self._epsilon, self._size = tuple(thresholds), epsilon, window
        self._random = random.Random(seed)
        self._windows = [{arm: _Window(window) for arm in self._arms} for _ in thresholds]

    def pick(self, live: int, *, without: Collection[str] = ()) -> Strategy:
        """Arm for a batch of so many requests; none of the drafters named in `without`."""
        arms = [arm for arm in self._arms if arm.drafter not in without]
        if self._random.random() < self._epsilon:
            return self._random.choice(arms)
        windows = self._windows[self._bucket(live)]
        return max(arms, key=lambda arm: windows[arm].median())

    def reward(self, report: RoundReport) -> None:
        """Learn from a round."""
        windows = self._windows[self._bucket(report.live)]
        if report.strategy in windows:
            tokens = report.live + sum(report.accepted)
            windows[report.strategy].add(tokens / max(report.draft_s + report.backlog_s + report.verify_s, 1e-9))

    def clear(self, drafter: str | None) -> None:
        """Forget what a drafter (None: each) has earned."""
        for windows in self._windows:
            for arm in windows:
                if drafter in (None, arm.drafter):
                    windows[arm] = _Window(self._size)

    def state_dict(self) -> dict[str, Any]:
        """As JSON values."""
        version, words, gauss = self._random.getstate()
        rewards = {
            str(threshold): {str(arm): list(window.values) for arm, window in windows.items()}
            for threshold, windows in zip(self._thresholds, self._windows, strict=True)
        }
        return {"random": [version, list(words), gauss], "rewards": rewards}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Buckets and arms that no longer exist are dropped."""
        version, words, gauss = state["random"]
        self._random.setstate((version, tuple(words), gauss))
        for threshold, windows in zip(self._thresholds, self._windows, strict=True):
            saved = state["rewards"].get(str(threshold), {})
            for arm in windows:
                windows[arm] = _Window(self._size, saved.get(str(arm), ()))

    def _bucket(self, live: int) -> int:
        return max(i for i, threshold in enumerate(self._thresholds) if threshold <= live)
