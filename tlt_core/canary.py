"""Canary: after each publish, was every worker handed the same weights, and does the drafter still fit?

    publish    -> every worker's version and digest of what it was to load            `WeightDigest`, `outliers`
    the rounds -> accepted draft tokens against what the rounds before would expect   `Canary.observe`
               -> fine, or collapsed: an alarm; the owner suspends the drafter until the next publish

Speculation changes no token, so weights that went astray show in nothing but the speed: this is where they show.

The acceptance of two rounds compares only at equal draft shapes.  So the shares of rows that accept k tokens, of those
that were offered k, are kept by width (a tree's are higher than a chain's) and depth, and the rows of a window are held
against them:

    expected = sum over rows, over k up to the depth offered, of share_k(width)      collapsed: accepted < expected / 2

The bonus token is in neither.  A window is judged when `_WINDOW` tokens were expected; a drafter that hardly had
anything accepted cannot collapse.  The rounds are of one kind: of training rollouts, all with the same temperature.
"""

import logging
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tlt_core.speculation import RoundReport

log = logging.getLogger(__name__)

_WINDOW = 64.0  # accepted tokens expected; the drafts of a row succeed together, so that half is 2.5 deviations off
_COLLAPSED = 0.5
_LEAST_ROWS = 64  # of a draft shape, before it can be expected of others
_MOST_ROWS = 4096  # that a baseline remembers; more are halved
_SAMPLES = 64  # of each tensor


class Verdict(NamedTuple):
    """What the first rounds after a publish say of a drafter."""

    drafter: str
    collapsed: bool
    ratio: float  # accepted / expected


class CanaryReport(NamedTuple):
    """One worker's canary, for the metrics of a step."""

    suspended: tuple[str, ...]
    ratios: tuple[float, ...]  # of the drafters judged since the latest publish


class _Shares:
    """Rows offered at least k tokens, and those of them that accepted as many, by (width, k)."""

    def __init__(self) -> None:
        self.rows = 0.0
        self.offered: defaultdict[tuple[int, int], float] = defaultdict(float)
        self.accepted: defaultdict[tuple[int, int], float] = defaultdict(float)

    def add(self, width: int, offered: int, accepted: int) -> None:
        """One row of one round."""
        self.rows += 1
        for depth in range(1, offered + 1):
            self.offered[width, depth] += 1
            self.accepted[width, depth] += accepted >= depth

    def merge(self, other: "_Shares") -> None:
        """Add the other's rows."""
        self.rows += other.rows
        for own, more in ((self.offered, other.offered), (self.accepted, other.accepted)):
            for at, count in more.items():
                own[at] += count

    def age(self) -> None:
        """Old rows weigh less and less."""
        if self.rows > _MOST_ROWS:
            self.rows /= 2
            for counts in (self.offered, self.accepted):
                counts.update({at: count / 2 for at, count in counts.items()})

    def expected(self, width: int, offered: int) -> float | None:
        """Tokens that a row accepts of so many offered; None: too little was seen of that shape."""
        at = [(width, depth) for depth in range(1, offered + 1)]
        if any(self.offered.get(shape, 0.0) < _LEAST_ROWS for shape in at):
            return None
        return sum(self.accepted[shape] / self.offered[shape] for shape in at)

    def state(self) -> list[Any]:
        """As JSON values."""
        return [self.rows, [[*at, count, self.accepted[at]] for at, count in self.offered.items()]]

    def restore(self, state: Sequence[Any]) -> None:
        """Go on from `state`."""
        self.rows, shapes = state
        self.offered = defaultdict(float, {(width, depth): count for width, depth, count, _ in shapes})
        self.accepted = defaultdict(float, {(width, depth): count for width, depth, _, count in shapes})


class _Watch:
    """One drafter: what it did before the publish, and since, as long as no verdict has been reached."""

    def __init__(self) -> None:
        self.before = _Shares()
        self.since = _Shares()
        self.open = False  # whether a verdict is due
        self.accepted = 0.0
        self.expected = 0.0
        self.ratio: float | None = None  # of the latest verdict, since the publish
        self.suspended = False

    def restart(self) -> None:
        """A new window.  What an unfinished one holds becomes past, unless it looks like a collapse."""
        if self.open and self.accepted >= _COLLAPSED * self.expected:
            self.before.merge(self.since)
        self.since, self.open, self.accepted, self.expected = _Shares(), True, 0.0, 0.0

    def add(self, width: int, offered: int, accepted: int) -> None:
        """One row of one round."""
        expected = self.before.expected(width, offered) if self.open else None
        (self.since if self.open else self.before).add(width, offered, accepted)
        self.before.age()
        if expected is not None:  # else a shape that is new since the publish: there is nothing to equal
            self.accepted += accepted
            self.expected += expected

    def judge(self) -> bool:
        """Whether a verdict was reached with the rows so far."""
        if not self.open or (self.expected < _WINDOW and self.since.rows < _MOST_ROWS):
            return False
        self.open = False
        self.ratio = self.accepted / self.expected if self.expected >= _WINDOW else None
        self.suspended = self.ratio is not None and self.ratio < _COLLAPSED
        if not self.suspended:
            self.before.merge(self.since)
            self.before.age()
        return self.ratio is not None


class Canary:
    """Watches the drafters of one engine.  `published` after each publish, `observe` after each round."""

    def __init__(self, drafters: Iterable[str]) -> None:
        """drafters: those with weights; a model-free one has none that a publish could spoil."""
        self._watches = {name: _Watch() for name in drafters}

    def published(self, drafter: str | None = None) -> tuple[str, ...]:
        """New weights of a drafter, or of the policy (None), are in use.  Returns the drafters whose suspension ends.

        A window that was not full when the policy changed goes on: a drafter that is hardly used any more, because
        it has collapsed, would else never be judged.
        """
        resumed = []
        for name, watch in self._watches.items():
            if drafter not in (None, name):
                continue
            if watch.suspended:
                watch.suspended = False
                resumed.append(name)
            if drafter is not None or not watch.open:
                watch.restart()
            watch.ratio = None
        return tuple(resumed)

    def observe(self, report: RoundReport) -> Verdict | None:
        """Learn from a round; a verdict where it was the last one that was needed.  A collapse is logged."""
        watch = self._watches.get(report.strategy.drafter)
        if watch is None or watch.suspended:
            return None
        for offered, accepted in zip(report.offered, report.accepted, strict=True):
            watch.add(report.strategy.width, offered, accepted)
        if not watch.judge() or watch.ratio is None:
            return None
        if watch.suspended:
            log.warning(
                "drafter %r has collapsed since the latest publish: %d draft tokens accepted where %.0f were expected; "
                "it is not used until the next one",
                report.strategy.drafter,
                watch.accepted,
                watch.expected,
            )
        return Verdict(report.strategy.drafter, watch.suspended, watch.ratio)

    def report(self) -> CanaryReport:
        """What is known since the latest publish."""
        watches = self._watches.items()
        return CanaryReport(
            tuple(name for name, watch in watches if watch.suspended),
            tuple(watch.ratio for _, watch in watches if watch.ratio is not None),
        )

    def state_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            name: {
                "before": watch.before.state(),
                "since": watch.since.state(),
                "flags": [watch.open, watch.suspended],
                "numbers": [watch.accepted, watch.expected, watch.ratio],
            }
            for name, watch in self._watches.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what `state_dict` returned; drafters that are not watched are dropped."""
        for name in self._watches.keys() & state.keys():
            watch, saved = self._watches[name], state[name]
            watch.before.restore(saved["before"])
            watch.since.restore(saved["since"])
            watch.open, watch.suspended = saved["flags"]
            watch.accepted, watch.expected, watch.ratio = saved["numbers"]


def canary_metrics(reports: Sequence[CanaryReport]) -> dict[str, float]:
    """drafter/alarm: workers on which a drafter is suspended.  drafter/canary_ratio: accepted draft tokens over those
    expected, in the first rounds after the publish, the worst of all workers; absent before a verdict."""
    ratios = [ratio for report in reports for ratio in report.ratios]
    alarm = {"drafter/alarm": float(sum(bool(report.suspended) for report in reports))}
    return alarm | ({"drafter/canary_ratio": min(ratios)} if ratios else {})


class WeightDigest:
    """Fingerprint of weights on their way into an engine, from a strided sample of each tensor: a few milliseconds.

    digest = WeightDigest()
    engine.load_weights(digest.through(trainer.weights()))
    digest.value  # equal on all workers, if they have loaded the same
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        self._samples: list[Tensor] = []

    def through(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The same names and tensors."""
        for name, tensor in weights:
            flat = tensor.detach().reshape(-1)
            self._names.append(f"{name} {tuple(tensor.shape)} {tensor.dtype}")
            self._samples.append(flat[:: max(1, len(flat) // _SAMPLES)].clone().view(torch.uint8))
            yield name, tensor

    @property
    def value(self) -> int:
        """32 bits of what went through; the order of the tensors counts."""
        checksum = zlib.crc32("\n".join(self._names).encode())
        if not self._samples:
            return checksum
        return zlib.crc32(torch.cat(self._samples).cpu().numpy().tobytes(), checksum)


def outliers(published: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Workers whose (version, digest) is not the most common one; the first of equally common ones is right."""
    if not published:
        return ()
    common = Counter(published).most_common(1)[0][0]
    return tuple(worker for worker, own in enumerate(published) if own != common)
