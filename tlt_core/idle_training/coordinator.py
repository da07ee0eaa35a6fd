"""What idle workers do: the state machine over all workers of a rollout phase.

                     WorkerIdle        Progress -> TRAIN, STREAM
              BUSY ------------> IDLE -----------------------> TRAINING, STREAMING
                                    ^                             |
                                    +---- Progress -> WAIT, STOP--+

consumes: events.  waits: never, and no worker for another.  produces: an order for the worker that reported.

The rule:

    passes of the policy update that are ready come first: all workers have to do later what is not done now
    else train the drafter
    stop when the rollout ends, after the piece in hand

With `stream_first` off, the first two change places.

No clock, no I/O: `at_s` of all events comes from one clock.  A worker that is not busy reports `Progress` between
micro-steps (TRAIN), after a pass of the policy update (STREAM) or after a short sleep (WAIT), and leaves the phase on
STOP.  One TRAIN allows one micro-step, so `max_steps` is exact.  One STREAM allows one of the passes that were offered.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from tlt_core.items.types import WorkerSpan, WorkerState


class PhaseBegan(NamedTuple):
    """A rollout phase begins; every worker is there and busy."""

    step: int  # RL step
    at_s: float


class WorkerIdle(NamedTuple):
    """A worker has no request left."""

    worker: int
    at_s: float
    has_data: bool  # its buffer holds something to train on


class Progress(NamedTuple):
    """A worker that is not busy asks what to do."""

    worker: int
    steps_done: int  # micro-steps finished in this phase so far
    at_s: float
    has_data: bool


class PassesOffered(NamedTuple):
    """Passes of the policy update can be computed."""

    passes: int


class RolloutOver(NamedTuple):
    """Every request of the phase has finished: idle time ends here."""

    at_s: float


Event = PhaseBegan | WorkerIdle | Progress | PassesOffered | RolloutOver


class Action(Enum):
    """What a worker shall do."""

    TRAIN = "train"  # one micro-step of the drafter, then report
    STREAM = "stream"  # one pass of the policy update, then report
    WAIT = "wait"  # nothing; report again soon
    STOP = "stop"  # leave the phase


class Order(NamedTuple):
    """Answer to a worker.  Order(Action.WAIT, "min_idle")"""

    action: Action
    reason: str  # one of REASONS


REASONS = (
    "training",
    "streaming",
    "min_idle",
    "no_data",
    "max_steps",
    "interval",
    "disabled",
    "busy",
    "rollout_over",
)


@dataclass(frozen=True, slots=True)
class IdleTrainingSettings:
    """What idle workers may do."""

    enabled: bool = True  # train the drafter
    stream_first: bool = True  # the policy update goes before the drafter; else only where it cannot be trained
    min_idle_s: float = 0.2  # that a worker is idle before it trains
    max_steps: int = 0  # micro-steps of all workers in one phase; 0: no bound
    interval: int = 1  # train every N RL steps

    def __post_init__(self) -> None:
        if self.min_idle_s < 0 or self.max_steps < 0 or self.interval < 1:
            raise ValueError(
                f"min_idle_s {self.min_idle_s} < 0, max_steps {self.max_steps} < 0 or interval {self.interval} < 1"
            )


class PhaseReport(NamedTuple):
    """What a phase was like, for the timeline and the metrics."""

    spans: tuple[WorkerSpan, ...]  # contiguous for each worker, from PhaseBegan on
    over_s: float  # when rollout had ended everywhere
    preempt_s: tuple[float, ...]  # of each worker that trained or streamed then: until it reported
    steps: int  # micro-steps of all workers
    idle_by_reason_s: Mapping[str, float]  # worker seconds without requests up to `over_s`: what for, or why not


_CANNOT_TRAIN = ("no_data", "max_steps", "interval", "disabled")  # in this phase, or not yet
_WORKING = (WorkerState.TRAINING, WorkerState.STREAMING)


@dataclass(slots=True)
class _Worker:
    """A worker that takes part in the phase."""

    state: WorkerState
    since_s: float  # of the state
    idle_s: float = 0.0  # when its idle window began
    counted_s: float = 0.0  # up to here its idle time has a reason
    reason: str = "min_idle"  # of the idle time since then
    steps_done: int = 0
    granted: int = 0  # steps ordered and not reported


@dataclass(slots=True)
class _Phase:
    """Everything that a new phase resets."""

    step: int
    workers: dict[int, _Worker]
    over_s: float | None = None
    spans: list[WorkerSpan] = field(default_factory=list)
    preempting: set[int] = field(default_factory=set)  # worked when rollout ended, not heard of since
    preempt_s: list[float] = field(default_factory=list)
    offered: int = 0  # passes of the update that no worker computes yet
    idle_by_reason_s: dict[str, float] = field(default_factory=dict)


class Coordinator:
    """`handle` each event in the order of its arrival; `report` when the phase has ended."""

    def __init__(self, num_workers: int, settings: IdleTrainingSettings) -> None:
        self._num_workers, self._settings = num_workers, settings
        self._phase = _Phase(step=0, workers={}, over_s=0.0)  # before the first phase nobody is asked for anything

    def handle(self, event: Event) -> Order | None:
        """Advance; an order for the worker that reported, None when no worker asked."""
        match event:
            case PhaseBegan(step, at_s):
                workers = {w: _Worker(WorkerState.BUSY, at_s) for w in range(self._num_workers)}
                self._phase = _Phase(step, workers)
            case PassesOffered(passes):
                self._phase.offered += passes
            case RolloutOver(at_s):
                self._end_rollout(at_s)
            case _:
                return self._answer(event)
        return None

    def state(self, worker: int) -> WorkerState | None:
        """None: no phase has begun."""
        known = self._phase.workers.get(worker)
        return None if known is None else known.state

    @property
    def steps(self) -> int:
        """Micro-steps reported in this phase, all workers together."""
        return sum(w.steps_done for w in self._phase.workers.values())

    def report(self, at_s: float) -> PhaseReport:
        """The phase up to `at_s`.  Changes nothing."""
        phase = self._phase
        over_s = at_s if phase.over_s is None else phase.over_s
        open_spans = [
            WorkerSpan(number, w.state, w.since_s, max(at_s, w.since_s)) for number, w in phase.workers.items()
        ]
        reasons = dict(phase.idle_by_reason_s)
        for w in phase.workers.values():
            _add_idle(reasons, w, over_s)
        spans = sorted([*phase.spans, *open_spans], key=lambda span: (span.worker, span.start_s, span.end_s))
        return PhaseReport(tuple(spans), over_s, tuple(phase.preempt_s), self.steps, reasons)

    def _answer(self, event: WorkerIdle | Progress) -> Order:
        phase, worker = self._phase, self._phase.workers.get(event.worker)
        if worker is None:
            return Order(Action.STOP, "rollout_over")
        at_s = max(event.at_s, worker.since_s, worker.counted_s)  # clocks may step back; spans do not
        self._count(worker, at_s)
        if event.worker in phase.preempting:
            assert phase.over_s is not None, "set together"
            phase.preempting.remove(event.worker)
            phase.preempt_s.append(max(at_s - phase.over_s, 0.0))
        worker.granted = 0
        if isinstance(event, Progress):
            worker.steps_done = max(worker.steps_done, event.steps_done)
        elif worker.state == WorkerState.BUSY:
            self._enter(event.worker, WorkerState.IDLE, at_s)
            worker.idle_s = at_s
        order = self._decide(worker, at_s, has_data=event.has_data)
        if order.action == Action.TRAIN:
            worker.granted = 1
            self._enter(event.worker, WorkerState.TRAINING, at_s)
        elif order.action == Action.STREAM:
            phase.offered -= 1
            self._enter(event.worker, WorkerState.STREAMING, at_s)
        elif worker.state in _WORKING:
            self._enter(event.worker, WorkerState.IDLE, at_s)
        worker.reason = order.reason
        return order

    def _decide(self, worker: _Worker, at_s: float, *, has_data: bool) -> Order:
        settings, phase = self._settings, self._phase
        if phase.over_s is not None:
            return Order(Action.STOP, "rollout_over")
        pending = self.steps + sum(w.granted for w in phase.workers.values())
        obstacles = {
            "busy": worker.state == WorkerState.BUSY,
            "disabled": not settings.enabled,
            "interval": phase.step % settings.interval != 0,
            "max_steps": 0 < settings.max_steps <= pending,
            "min_idle": worker.state == WorkerState.IDLE and at_s - worker.idle_s < settings.min_idle_s,
            "no_data": not has_data,
        }
        reason = next((name for name, holds in obstacles.items() if holds), None)
        if phase.offered and (settings.stream_first or reason in _CANNOT_TRAIN) and reason != "busy":
            return Order(Action.STREAM, "streaming")
        return Order(Action.TRAIN, "training") if reason is None else Order(Action.WAIT, reason)

    def _end_rollout(self, at_s: float) -> None:
        phase = self._phase
        if phase.over_s is not None:
            return
        for worker in phase.workers.values():
            self._count(worker, at_s)
        phase.preempting = {n for n, w in phase.workers.items() if w.state in _WORKING}
        phase.over_s = at_s

    def _enter(self, number: int, state: WorkerState, at_s: float) -> None:
        """Change a worker's state, which leaves one span behind; nothing when it is in that state already."""
        worker = self._phase.workers[number]
        if worker.state == state:
            return
        self._phase.spans.append(WorkerSpan(number, worker.state, worker.since_s, at_s))
        worker.state, worker.since_s, worker.counted_s = state, at_s, at_s

    def _count(self, worker: _Worker, at_s: float) -> None:
        """Give the worker's idle time up to `at_s`, or up to the end of rollout, its reason."""
        over_s = self._phase.over_s
        _add_idle(self._phase.idle_by_reason_s, worker, at_s if over_s is None else min(at_s, over_s))
        worker.counted_s = max(worker.counted_s, at_s)


def _add_idle(reasons: dict[str, float], worker: _Worker, until_s: float) -> None:
    """Add the idle time of a worker that has not been counted yet."""
    if worker.state != WorkerState.BUSY and until_s > worker.counted_s:
        reasons[worker.reason] = reasons.get(worker.reason, 0.0) + until_s - worker.counted_s
