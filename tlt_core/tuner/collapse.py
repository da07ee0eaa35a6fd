"""Notices when a drafter's acceptance collapses after new weights were published.

    publish          a check opens
    each round       accepted draft tokens are compared with what the rounds before the publish lead to expect
    enough tokens    verdict: fine, or collapsed; a collapsed drafter is suspended by the owner until the next publish

Speculation changes no token, so bad drafter weights show in the speed alone.  This check makes them visible.

Acceptance depends on the shape of the draft: a tree's is higher than a chain's.  So past shares are kept by width and
depth, and a draft of width w that reaches depth d is expected to have

    share(w, 1) + .. + share(w, d)        accepted tokens, share(w, k): drafts accepted to depth k / drafts that reach k

The bonus token is not counted.  Only training rollouts are observed: they all have the same temperature.
"""

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from tlt_core.items.speculation import RoundReport

log = logging.getLogger(__name__)

_COLLAPSED = 0.5  # accepted / expected; a worse policy moves acceptance by a few percent, broken weights by 90
_ENOUGH = 64.0  # expected tokens before a verdict: half of them is then 2.5 standard deviations off
_LEAST_DRAFTS = 64  # of a shape before the publish; with fewer its share is too uncertain to expect anything
_MOST_DRAFTS = 4096  # remembered; counts are halved above, so that the past follows the training


class Verdict(NamedTuple):
    """What the first rounds after a publish say about a drafter."""

    drafter: str
    collapsed: bool
    ratio: float  # accepted / expected


class CollapseReport(NamedTuple):
    """What one worker knows since the latest publish, for the metrics of a step."""

    suspended: tuple[str, ...]  # drafters
    ratios: tuple[float, ...]  # of the drafters that have a verdict


class _Shares:
    """Drafts that reach each depth, and those accepted to it, by (width, depth)."""

    def __init__(self) -> None:
        self.drafts = 0.0
        self.offered: defaultdict[tuple[int, int], float] = defaultdict(float)
        self.accepted: defaultdict[tuple[int, int], float] = defaultdict(float)

    def add(self, width: int, offered: int, accepted: int) -> None:
        """One request in one round."""
        self.drafts += 1
        for depth in range(1, offered + 1):
            self.offered[width, depth] += 1
            self.accepted[width, depth] += accepted >= depth

    def merge(self, other: "_Shares") -> None:
        """Add the other's drafts."""
        self.drafts += other.drafts
        for own, more in ((self.offered, other.offered), (self.accepted, other.accepted)):
            for at, count in more.items():
                own[at] += count

    def fade(self) -> None:
        """Halve all counts when there are many."""
        if self.drafts > _MOST_DRAFTS:
            self.drafts /= 2
            for counts in (self.offered, self.accepted):
                counts.update({at: count / 2 for at, count in counts.items()})

    def expected(self, width: int, offered: int) -> float | None:
        """Tokens accepted of a draft that reaches depth `offered`; None when too little is known of that shape."""
        at = [(width, depth) for depth in range(1, offered + 1)]
        if any(self.offered.get(shape, 0.0) < _LEAST_DRAFTS for shape in at):
            return None
        return sum(self.accepted[shape] / self.offered[shape] for shape in at)

    def state(self) -> list[Any]:
        """As JSON values."""
        return [self.drafts, [[*at, count, self.accepted[at]] for at, count in self.offered.items()]]

    def restore(self, state: Sequence[Any]) -> None:
        """Go on from `state`."""
        self.drafts, shapes = state
        self.offered = defaultdict(float, {(width, depth): count for width, depth, count, _ in shapes})
        self.accepted = defaultdict(float, {(width, depth): count for width, depth, _, count in shapes})


class _Check:
    """One drafter: its rounds before the publish, and those since while there is no verdict."""

    def __init__(self) -> None:
        self.before = _Shares()
        self.since = _Shares()
        self.open = False  # whether a verdict is due
        self.accepted = 0.0
        self.expected = 0.0
        self.ratio: float | None = None  # of the verdict on the latest publish
        self.suspended = False

    def restart(self) -> None:
        """Open a new check.  The rounds of an unfinished one join the past, unless they look like a collapse."""
        if self.open and self.accepted >= _COLLAPSED * self.expected:
            self.before.merge(self.since)
        self.since, self.open, self.accepted, self.expected = _Shares(), True, 0.0, 0.0

    def add(self, width: int, offered: int, accepted: int) -> None:
        """One request in one round."""
        expected = self.before.expected(width, offered) if self.open else None
        (self.since if self.open else self.before).add(width, offered, accepted)
        self.before.fade()
        if expected is not None:
            self.accepted += accepted
            self.expected += expected

    def judge(self) -> bool:
        """Close the check if enough was seen; returns whether there is a new verdict.

        A drafter that hardly had anything accepted before the publish never reaches `_ENOUGH`: it cannot collapse.
        """
        if not self.open or (self.expected < _ENOUGH and self.since.drafts < _MOST_DRAFTS):
            return False
        self.open = False
        self.ratio = self.accepted / self.expected if self.expected >= _ENOUGH else None
        self.suspended = self.ratio is not None and self.ratio < _COLLAPSED
        if not self.suspended:
            self.before.merge(self.since)
            self.before.fade()
        return self.ratio is not None


class CollapseMonitor:
    """Watches the drafters of one engine.  Call `published` after each publish and `observe` after each round."""

    def __init__(self, drafters: Iterable[str]) -> None:
        """drafters: those that have weights."""
        self._checks = {name: _Check() for name in drafters}

    def published(self, drafter: str | None = None) -> tuple[str, ...]:
        """New weights of a drafter, or of the policy (None), are in use.  Returns the drafters whose suspension ends.

        A new policy does not restart an open check.  Otherwise a collapsed drafter, which the tuner hardly chooses any
        more, would never be judged.
        """
        resumed = []
        for name, check in self._checks.items():
            if drafter not in (None, name):
                continue
            if check.suspended:
                check.suspended = False
                resumed.append(name)
            if drafter is not None or not check.open:
                check.restart()
            check.ratio = None
        return tuple(resumed)

    def observe(self, report: RoundReport) -> Verdict | None:
        """Learn from a round.  Returns a verdict if this round completed one; a collapse is logged."""
        check = self._checks.get(report.strategy.drafter)
        if check is None or check.suspended:
            return None
        for offered, accepted in zip(report.offered, report.accepted, strict=True):
            check.add(report.strategy.width, offered, accepted)
        if not check.judge() or check.ratio is None:
            return None
        if check.suspended:
            log.warning(
                "drafter %r has collapsed since the latest publish: %d draft tokens accepted where %.0f were expected; "
                "it is not used until the next one",
                report.strategy.drafter,
                check.accepted,
                check.expected,
            )
        return Verdict(report.strategy.drafter, check.suspended, check.ratio)

    def report(self) -> CollapseReport:
        """What is known since the latest publish."""
        return CollapseReport(
            tuple(name for name, check in self._checks.items() if check.suspended),
            tuple(check.ratio for check in self._checks.values() if check.ratio is not None),
        )

    def state_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            name: {
                "before": check.before.state(),
                "since": check.since.state(),
                "flags": [check.open, check.suspended],
                "numbers": [check.accepted, check.expected, check.ratio],
            }
            for name, check in self._checks.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what `state_dict` returned; drafters that are not watched are dropped."""
        for name in self._checks.keys() & state.keys():
            check, saved = self._checks[name], state[name]
            check.before.restore(saved["before"])
            check.since.restore(saved["since"])
            check.open, check.suspended = saved["flags"]
            check.accepted, check.expected, check.ratio = saved["numbers"]


def collapse_metrics(reports: Sequence[CollapseReport]) -> dict[str, float]:
    """drafter/alarm: workers on which a drafter is suspended.  drafter/canary_ratio: accepted over expected draft
    tokens in the first rounds after the publish, the lowest of all workers; absent before a verdict."""
    ratios = [ratio for report in reports for ratio in report.ratios]
    alarm = {"drafter/alarm": float(sum(bool(report.suspended) for report in reports))}
    return alarm | ({"drafter/canary_ratio": min(ratios)} if ratios else {})
