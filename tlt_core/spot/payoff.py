"""Does training in idle time pay?  Decides, from phase to phase, for what share of it idle workers train.

    PhaseOutcome (what training cost and gained) --observe--> Payoff --duty--> share of idle time in the next phase

Training slows workers that still decode by a measured share (`slowdown`), and makes later rollouts faster by what
trials of candidates measure.  Let t be the seconds of a phase in which some worker is idle, d the share of them that
trained, and g the relative gain in acceptance length of one such phase.  Drafts are used in about the same seconds, the
tail, so

    cost = slowdown * d * t                    gain = g * t * (phases that a gain lasts)

While the gain covers the cost, workers train whenever they are idle, except for short pauses that measure the slowdown.
Otherwise they train only as much as lengthens the rollout by `max_slowdown`; these trials show when candidates gain
again.  After several phases without a trial, one phase is trained in full.  When the acceptance of the drafter in use
drops, the policy has moved, and full training resumes.  Slowdown and gain start from usual values, so that the first
phases train.

The gain of one phase is smaller than the error of its measurement, so it is averaged over many phases.

No clock, no I/O: a function of the outcomes.
"""

import math
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from tlt_core.spot.idle_value import drafter_worth
from tlt_core.spot.slowdown import PaceSums

PAUSED = 0.055  # share of idle time in which the slowdown is measured
_KEEP = 0.6  # weight of the earlier phases in a running mean
_KEEP_LONG = 0.9  # ... of slowdown and gain, which take many phases to measure
_LOOK_AGAIN = 8  # phases without a measured gain after which one is trained in full
_USUAL_SLOWDOWN, _USUAL_ERROR = 0.1, 0.1
_USUAL_GAIN = 0.03  # of a phase in which the drafter was stale
_FALLEN = 0.93  # acceptance length against its best, both smoothed: the drafter in use has gone stale


class PhaseOutcome(NamedTuple):
    """One rollout phase."""

    rollout_s: float  # from its beginning to its end everywhere
    idle_s: float  # seconds of it in which some worker was idle
    trained_s: float  # seconds of it in which some worker trained
    pace: PaceSums
    used_length: float | None = None  # acceptance length of the drafter in use, in a trial; None: there was none
    gain: float | None = None  # of the newest candidate, relative to it
    trained_worker_s: float = 0.0  # as trained_s, but of all workers together
    used_share: float | None = (
        None  # of the rounds beside an idle worker, by time, that use this drafter; None: no rounds
    )


@dataclass(frozen=True, slots=True)
class PayoffSettings:
    """See the module docstring."""

    max_slowdown: float = 0.01  # share by which training that does not pay may lengthen a rollout; 1 or more: any
    lasting_phases: int = 24  # phases that a gain lasts

    def __post_init__(self) -> None:
        if self.max_slowdown <= 0 or self.lasting_phases < 1:
            raise ValueError(f"max_slowdown {self.max_slowdown} <= 0 or lasting_phases {self.lasting_phases} < 1")


@dataclass(slots=True)
class _Known:
    """What the outcomes have taught; JSON values."""

    pace: list[float] = field(default_factory=lambda: list(PaceSums()))
    rollout_s: float = 0.0
    idle_s: float = 0.0
    share: float = 1.0  # of idle seconds that trained, in the phases with a measured gain
    used: float = 1.0  # share of the idle seconds' rounds that use this drafter
    workers: float = 1.0  # that trained at a time, in these phases
    gain: float = _USUAL_GAIN
    unmeasured: int = 0  # phases since a gain was measured
    length: float = 0.0
    best_length: float = 0.0


class Payoff:
    """`duty` before each phase, `observe` after it."""

    def __init__(self, settings: PayoffSettings) -> None:
        self._settings = settings
        self._known = _Known()

    def observe(self, outcome: PhaseOutcome) -> None:
        """Learn from a phase."""
        known = self._known
        known.pace = list(PaceSums(*known.pace).plus(outcome.pace, keep=_KEEP_LONG))
        first = known.rollout_s == 0
        known.rollout_s = outcome.rollout_s if first else _mixed(known.rollout_s, outcome.rollout_s)
        known.idle_s = outcome.idle_s if first else _mixed(known.idle_s, outcome.idle_s)
        if outcome.used_share is not None:
            known.used = _mixed(known.used, outcome.used_share)
        known.unmeasured = 0 if outcome.gain is not None else known.unmeasured + 1
        if known.unmeasured >= _LOOK_AGAIN:  # too short to measure anything in: look again
            enough = self.slowdown / self._settings.lasting_phases
            known.gain, known.share, known.unmeasured = max(known.gain, _USUAL_GAIN, enough), 1.0, 0
        if outcome.gain is not None:
            known.gain = _mixed(known.gain, outcome.gain, keep=_KEEP_LONG)
            share = outcome.trained_s / max(outcome.idle_s, outcome.trained_s, 1e-9)
            known.share = _mixed(known.share, share, keep=_KEEP_LONG)
            workers = outcome.trained_worker_s / max(outcome.trained_s, 1e-9)
            known.workers = _mixed(known.workers, max(workers, 1.0), keep=_KEEP_LONG)
        if outcome.used_length is not None:
            known.length = outcome.used_length if not known.length else _mixed(known.length, outcome.used_length)
            known.best_length = max(known.best_length, known.length)
            if known.length < _FALLEN * known.best_length:
                known.gain, known.share = max(known.gain, _USUAL_GAIN), 1.0
                known.best_length = known.length

    @property
    def duty(self) -> float:
        """Share of idle time to train in, in the next phase; 1: all of it, without pauses."""
        if self._settings.max_slowdown >= 1:
            return 1.0
        full, cost_s = 1 - PAUSED, self.slowdown * self._known.idle_s
        budget_s = self._settings.max_slowdown * self._known.rollout_s
        if cost_s * full <= budget_s or self.pays:
            return full
        return budget_s / cost_s

    def worth(self, phases_left: int) -> float:
        """Seconds gained by an idle second of training, see `idle_value`.  phases_left: of the run, after this one."""
        known = self._known
        return drafter_worth(
            known.gain,
            used=known.used,
            lasting_phases=min(self._settings.lasting_phases, max(phases_left, 0)),
            share=known.share,
            workers=known.workers,
        )

    @property
    def pays(self) -> bool:
        """Does training cover its cost?"""
        return self._known.gain * self._settings.lasting_phases >= self.slowdown * self._known.share

    @property
    def slowdown(self) -> float:
        """Relative slowdown of a round by training: the measurement, drawn to a usual value while it is uncertain."""
        difference, error = PaceSums(*self._known.pace).difference()
        if math.isinf(error):
            return _USUAL_SLOWDOWN
        trust = 1 / max(error, 1e-6) ** 2
        usual = 1 / _USUAL_ERROR**2
        return max(math.expm1((trust * difference + usual * _USUAL_SLOWDOWN) / (trust + usual)), 0.0)

    def metrics(self) -> dict[str, float]:
        """drafter/slowdown and its error (as measured alone, absent before), drafter/expected_gain (relative, of a
        phase), drafter/duty (of the next phase)."""
        difference, error = PaceSums(*self._known.pace).difference()
        measured = {} if math.isinf(error) else {"drafter/slowdown": math.expm1(difference)}
        if measured:
            measured["drafter/slowdown_error"] = error
        return measured | {"drafter/expected_gain": self._known.gain, "drafter/duty": self.duty}

    def state_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self._known)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`."""
        self._known = _Known(**state)


def _mixed(old: float, new: float, *, keep: float = _KEEP) -> float:
    return keep * old + (1 - keep) * new
