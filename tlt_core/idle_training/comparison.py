"""Is a candidate worse than the drafter in use?  A paired comparison on the same held-back tokens.

Both draft from every start of a chain, so the difficulty of a response cancels: the difference varies far less than
either length.  Responses to one prompt of one step are alike, so only such groups count as independent.  With m groups,
n_g starts in group g, and d_g tokens that the candidate's chains got accepted beyond those of the drafter in use:

    gain = sum d_g / sum n_g            error^2 = m / (m - 1) * sum (d_g - gain n_g)^2 / (sum n_g)^2

the ratio estimator and its error by groups (Cochran, Sampling Techniques, 1977, section 6.4).
"""

import math
from collections.abc import Iterable
from typing import NamedTuple


class Group(NamedTuple):
    """Chains along the held-back responses to one prompt of one step.  Group(starts=210, used=640, candidate=655)"""

    starts: int
    used: int  # drafts accepted, all chains together
    candidate: int


class Comparison(NamedTuple):
    """Sums over groups: those of several workers add up.  Comparison() knows nothing."""

    groups: float = 0.0
    starts: float = 0.0
    used: float = 0.0
    candidate: float = 0.0
    squared_gains: float = 0.0  # d^2
    gains_starts: float = 0.0  # d n
    squared_starts: float = 0.0  # n^2

    @classmethod
    def of(cls, groups: Iterable[Group]) -> "Comparison":
        """Groups without a start do not count."""
        counts = [(n, used, candidate, candidate - used) for n, used, candidate in groups if n]
        rows = [(1, n, used, candidate, d * d, d * n, n * n) for n, used, candidate, d in counts]
        return cls(*(float(sum(column)) for column in zip(*rows, strict=True)))

    def plus(self, other: "Comparison") -> "Comparison":
        """Both together; their groups are counted as different ones."""
        return Comparison(*(a + b for a, b in zip(self, other, strict=True)))

    @property
    def used_length(self) -> float:
        """Acceptance length of the drafter in use, the bonus token included."""
        return 1 + self.used / max(self.starts, 1)

    @property
    def candidate_length(self) -> float:
        return 1 + self.candidate / max(self.starts, 1)

    @property
    def gain(self) -> float:
        """Tokens a round that the candidate has accepted beyond the drafter in use."""
        return (self.candidate - self.used) / max(self.starts, 1)

    @property
    def error(self) -> float:
        """Standard error of the gain; infinite with less than two groups."""
        if self.groups < 2:
            return math.inf
        gain = self.gain
        squares = self.squared_gains - 2 * gain * self.gains_starts + gain**2 * self.squared_starts
        return math.sqrt(max(squares, 0.0) * self.groups / (self.groups - 1)) / self.starts

    @property
    def change(self) -> float:
        """Largest plausible relative difference of the acceptance lengths: gain plus its error."""
        return (abs(self.gain) + self.error) / self.used_length

    def is_worse(self, *, errors: float) -> bool:
        """Is the gain below zero by so many standard errors (one-sided)?  With one group: is it below zero at all?

        For m groups the number is that of Student's distribution to first order, z + (z^3 + z) / (4 (m - 1)).
        """
        if self.gain >= 0 or self.groups < 2:
            return self.gain < 0
        student = errors + (errors**3 + errors) / (4 * (self.groups - 1))
        return self.gain + student * self.error < 0
