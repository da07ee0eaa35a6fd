"""Shares of successes that follow changes: common to all requests, and how one request differs."""

from collections.abc import Sequence

MOST_WEIGHT = 100.0  # trials that a common mean remembers
_ROW_DECAY = 0.97  # per trial
_ROW_PRIOR = 10.0  # trials that the common estimate is worth to a request
OPTIMIST = 0.9
_OPTIMIST_WEIGHT = 4.0


class Rate:
    """A share of successes that follows changes: its mean, the weight of its evidence, and the trials ever seen."""

    __slots__ = ("mean", "seen", "weight")

    def __init__(self, mean: float, weight: float = 0.0) -> None:
        self.mean, self.weight, self.seen = mean, weight, 0.0

    def add(self, hits: float, trials: float) -> None:
        """Fold in one round."""
        self.seen += trials
        self.weight = min(self.weight + trials, max(MOST_WEIGHT, trials))
        self.mean += (hits - trials * self.mean) / self.weight

    def state(self) -> list[float]:
        """As JSON values."""
        return [self.mean, self.weight, self.seen]

    def restore(self, state: Sequence[float]) -> None:
        """Go on from `state`."""
        self.mean, self.weight, self.seen = state

    def optimistic(self) -> float:
        """The mean, moved to `OPTIMIST` as evidence lacks."""
        return self.mean + max(OPTIMIST - self.mean, 0.0) * _OPTIMIST_WEIGHT / (self.weight + _OPTIMIST_WEIGHT)


class RowBelief:
    """What one request did with one drafter: decayed trials, hits and expected hits, per position (0: proposes)."""

    __slots__ = ("expected", "hits", "multipliers", "trials")

    def __init__(self, depth: int) -> None:
        self.trials, self.hits, self.expected = [0.0] * (depth + 1), [0.0] * (depth + 1), [0.0] * (depth + 1)
        self.multipliers = [1.0] * (depth + 1)  # of the odds; entry 0 of c, the others of h_j

    def add(self, position: int, hit: bool, expected: float) -> None:
        """One trial; expected: the common estimate of its success."""
        self.trials[position] = self.trials[position] * _ROW_DECAY + 1.0
        self.hits[position] = self.hits[position] * _ROW_DECAY + hit
        self.expected[position] = self.expected[position] * _ROW_DECAY + expected

    def refresh(self) -> None:
        """Bring the multipliers up to date."""
        multiplier = 1.0
        for position, trials in enumerate(self.trials):
            if trials >= 0.5:
                odds = self.expected[position] / (trials - self.expected[position])
                start = multiplier * odds / (1.0 + multiplier * odds)
                mean = (self.hits[position] + _ROW_PRIOR * start) / (trials + _ROW_PRIOR)
                multiplier = mean / ((1.0 - mean) * odds)
            self.multipliers[position] = multiplier
            if position == 0:  # whether a drafter proposes says little about whether it is right
                multiplier = 1.0
