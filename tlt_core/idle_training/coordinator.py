"""What idle workers do: the state machine over all workers of one rollout phase.

                      Progress            Order: TRAIN, STREAM
              BUSY ------------> IDLE -----------------------> TRAINING, STREAMING
               ^                    ^                             |
               |                    +---- Order: WAIT, STOP ------+
               +------ Order: DECODE, when there are requests again (an environment has answered)

The rule:

    passes of the policy update that are ready come first: all workers have to do later what is not done now
    else train the drafter
    stop when the rollout ends, after the piece in hand

With `stream_first` off, the first two change places.

No clock, no I/O, no waiting: `at_s` comes from one clock.  A worker without requests reports `Progress` when it becomes
idle, between micro-steps (TRAIN), after a pass of the policy update (STREAM) or after a short sleep (WAIT), and leaves
the phase on STOP.  One TRAIN allows one micro-step, so `max_steps` is exact.  One STREAM allows one of the passes that
were offered.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from tlt_core.items.types import WorkerSpan, WorkerState


class Progress(NamedTuple):
    """A worker without requests asks what to do."""

    worker: int
    steps_done: int  # micro-steps finished in this phase so far
    at_s: float
    has_data: bool  # there is something to train on


class Action(Enum):
    """What a worker shall do."""

    TRAIN = "train"  # one micro-step of the drafter, then report
    STREAM = "stream"  # one pass of the policy update, then report
    WAIT = "wait"  # nothing; report again soon
    DECODE = "decode"  # there are requests again
    STOP = "stop"  # leave the phase


class Order(NamedTuple):
    """Answer to a worker.  Order(Action.WAIT, "min_idle")"""

    action: Action
    reason: str  # training, streaming, rollout_over, or what keeps it from training: see `Coordinator._obstacle`


@dataclass(frozen=True, slots=True)
class IdleTrainingSettings:
    """What idle workers may do."""

    enabled: bool = True  # train the drafter
    stream_first: bool = True  # the policy update goes before the drafter; else only where it cannot be trained
    min_idle_s: float = 0.2  # that a worker is idle before it trains
    max_steps: int = 0  # micro-steps of all workers in one phase; 0: no bound
    interval: int = 1  # train every N RL steps


class PhaseReport(NamedTuple):
    """What a phase was like, for the timeline and the metrics."""

    spans: tuple[WorkerSpan, ...]  # worker by worker, contiguous, from the phase's beginning on
    over_s: float  # when rollout had ended everywhere
    preempt_s: tuple[float, ...]  # of each worker that trained or streamed then: until it reported
    steps: int  # micro-steps of all workers
    idle_by_reason_s: Mapping[str, float]  # worker seconds without requests up to `over_s`: what for, or why not


_LONG_S = 0.5  # shorter windows do not count in the ratio: they hardly hold a micro-step
_WORKING = (WorkerState.TRAINING, WorkerState.STREAMING)


@dataclass(slots=True)
class _Worker:
    state: WorkerState
    since_s: float  # of the state
    counted_s: float  # up to here its idle time has a reason
    idle_s: float = 0.0  # when its idle window began
    reason: str = "min_idle"  # of the idle time since then
    steps_done: int = 0


class Coordinator:
    """Of one phase of RL step `step`, which begins with every worker there and busy."""

    def __init__(self, num_workers: int, settings: IdleTrainingSettings, *, step: int, at_s: float) -> None:
        self._settings, self._step = settings, step
        self._workers = [_Worker(WorkerState.BUSY, at_s, at_s) for _ in range(num_workers)]
        self._over_s: float | None = None
        self._spans: list[WorkerSpan] = []
        self._preempting: set[int] = set()  # worked when rollout ended, not heard of since
        self._preempt_s: list[float] = []
        self._offered = 0  # passes of the update that no worker computes yet
        self._idle_by_reason_s: dict[str, float] = {}

    def offer(self, passes: int) -> None:
        """So many passes of the policy update can be computed."""
        self._offered += passes

    def end(self, at_s: float) -> None:
        """Every request of the phase has finished: idle time ends here."""
        if self._over_s is not None:
            return
        for worker in self._workers:
            self._count(worker, at_s)
        self._preempting = {n for n, w in enumerate(self._workers) if w.state in _WORKING}
        self._over_s = at_s

    def order(self, event: Progress) -> Order:
        """What the worker shall do."""
        worker = self._workers[event.worker]
        at_s = max(event.at_s, worker.counted_s)  # clocks may step back; spans do not
        self._count(worker, at_s)
        if event.worker in self._preempting:
            assert self._over_s is not None, "set together"
            self._preempting.remove(event.worker)
            self._preempt_s.append(max(at_s - self._over_s, 0.0))
        worker.steps_done = max(worker.steps_done, event.steps_done)
        if worker.state == WorkerState.BUSY:
            self._enter(event.worker, WorkerState.IDLE, at_s)
            worker.idle_s = at_s
        order = self._decide(worker, at_s, has_data=event.has_data)
        if order.action == Action.TRAIN:
            self._enter(event.worker, WorkerState.TRAINING, at_s)
        elif order.action == Action.STREAM:
            self._offered -= 1
            self._enter(event.worker, WorkerState.STREAMING, at_s)
        else:
            self._enter(event.worker, WorkerState.IDLE, at_s)
        worker.reason = order.reason
        return order

    def busy(self, event: Progress) -> Order:
        """A worker without requests gets some again."""
        worker = self._workers[event.worker]
        at_s = max(event.at_s, worker.counted_s)
        self._count(worker, at_s)
        worker.steps_done = max(worker.steps_done, event.steps_done)
        self._enter(event.worker, WorkerState.BUSY, at_s)
        return Order(Action.DECODE, "requests")

    def report(self, at_s: float) -> PhaseReport:
        """The phase up to `at_s`."""
        over_s = at_s if self._over_s is None else self._over_s
        reasons, spans = dict(self._idle_by_reason_s), list(self._spans)
        for number, w in enumerate(self._workers):
            _add_idle(reasons, w, over_s)
            spans.append(WorkerSpan(number, w.state, w.since_s, max(at_s, w.since_s)))
        spans.sort(key=lambda span: (span.worker, span.start_s, span.end_s))
        return PhaseReport(tuple(spans), over_s, tuple(self._preempt_s), self._steps, reasons)

    @property
    def _steps(self) -> int:
        return sum(w.steps_done for w in self._workers)

    def _decide(self, worker: _Worker, at_s: float, *, has_data: bool) -> Order:
        if self._over_s is not None:
            return Order(Action.STOP, "rollout_over")
        obstacle = self._obstacle(worker, at_s, has_data=has_data)
        if self._offered and (self._settings.stream_first or obstacle not in (None, "min_idle")):  # which passes
            return Order(Action.STREAM, "streaming")
        return Order(Action.TRAIN, "training") if obstacle is None else Order(Action.WAIT, obstacle)

    def _obstacle(self, worker: _Worker, at_s: float, *, has_data: bool) -> str | None:
        """Why the worker cannot train now; None: it can."""
        settings = self._settings
        under_way = sum(w.state == WorkerState.TRAINING for w in self._workers if w is not worker)
        obstacles = {
            "disabled": not settings.enabled,
            "interval": self._step % settings.interval != 0,
            "max_steps": 0 < settings.max_steps <= self._steps + under_way,
            "min_idle": worker.state == WorkerState.IDLE and at_s - worker.idle_s < settings.min_idle_s,
            "no_data": not has_data,
        }
        return next((name for name, holds in obstacles.items() if holds), None)

    def _enter(self, number: int, state: WorkerState, at_s: float) -> None:
        """Change a worker's state, which leaves one span behind; nothing when it is in that state already."""
        worker = self._workers[number]
        if worker.state != state:
            self._spans.append(WorkerSpan(number, worker.state, worker.since_s, at_s))
            worker.state, worker.since_s, worker.counted_s = state, at_s, at_s

    def _count(self, worker: _Worker, at_s: float) -> None:
        """Give the worker's idle time up to `at_s`, or up to the end of rollout, its reason."""
        _add_idle(self._idle_by_reason_s, worker, at_s if self._over_s is None else min(at_s, self._over_s))
        worker.counted_s = max(worker.counted_s, at_s)


def _add_idle(reasons: dict[str, float], worker: _Worker, until_s: float) -> None:
    """Add the idle time of a worker that has not been counted yet."""
    if worker.state != WorkerState.BUSY and until_s > worker.counted_s:
        reasons[worker.reason] = reasons.get(worker.reason, 0.0) + until_s - worker.counted_s


def bubble(report: PhaseReport) -> dict[str, float]:
    """How much of a phase's idle time was used: `idle/*`, see docs/metrics.md.

    A worker's idle window begins with its last response and ends when rollout has ended everywhere.
    """
    windows = _idle_windows(report.spans, report.over_s)
    long = [(idle, used) for idle, used in windows if idle > _LONG_S]
    long_idle = sum(idle for idle, _ in long)
    streaming = [s for s in report.spans if s.state == WorkerState.STREAMING]
    metrics = {
        "idle/streamed_s": sum(max(min(s.end_s, report.over_s) - s.start_s, 0.0) for s in streaming),
        "idle/idle_s": sum(idle for idle, _ in windows),
        "idle/harvested_s": sum(used for _, used in windows),
        "idle/long_idle_s": long_idle,
        "idle/wait_s": max((s.end_s - report.over_s for s in streaming if s.end_s > report.over_s), default=0.0),
    }
    if long:
        metrics["idle/harvested_ratio"] = sum(used for _, used in long) / long_idle
    if report.preempt_s:
        rank = math.ceil(0.95 * len(report.preempt_s)) - 1
        metrics["idle/preempt_ms_p95"] = 1000 * sorted(report.preempt_s)[rank]
    unused = (r for r in report.idle_by_reason_s if r not in ("training", "streaming"))
    return metrics | {f"idle/untrained_s/{reason}": report.idle_by_reason_s[reason] for reason in unused}


def _idle_windows(spans: Sequence[WorkerSpan], over_s: float) -> list[tuple[float, float]]:
    """Seconds, and used seconds, of each stretch in which a worker had no request.  spans: as in `PhaseReport`."""
    windows: list[tuple[float, float]] = []
    worker = None
    for span in spans:
        seconds = max(min(span.end_s, over_s) - span.start_s, 0.0)
        if span.state not in (WorkerState.IDLE, *_WORKING):
            worker = None
            continue
        if span.worker != worker:
            windows.append((0.0, 0.0))
        worker = span.worker
        idle, used = windows[-1]
        windows[-1] = (idle + seconds, used + (seconds if span.state in _WORKING else 0.0))
    return windows
