"""Where a run is, in words, and how long the phase will still take."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tlt_core.items.types import WorkerState


class Progress(NamedTuple):
    """Where a run is, several times a second.  Progress(3, 12, "rollout", 41, 96, unit="responses", live=9, ...)"""

    step: int | None  # RL step; None: outside of the steps
    num_steps: int
    phase: str
    finished: int
    total: int  # 1: there is nothing to count
    live: int = 0
    tokens: int = 0
    tokens_per_s: float = 0.0
    worker_states: tuple[WorkerState, ...] = ()
    unit: str = ""  # of `finished` and `total`
    note: str = ""  # anything else to show, such as a loss


class Reporter:
    def __init__(self, show: Callable[[Progress], None], *, num_steps: int, num_workers: int) -> None:
        self.step: int | None = None  # as in `Progress`
        self._show, self._num_steps, self._num_workers = show, num_steps, num_workers

    def phase(self, name: str) -> None:
        state = WorkerState.UPDATING if name == "update" else WorkerState.IDLE
        self._show(Progress(self.step, self._num_steps, name, 0, 1, worker_states=(state,) * self._num_workers))

    def responses(
        self, phase: str, finished: int, total: int, *, live: Sequence[int], tokens: int, tokens_per_s: float
    ) -> None:
        """`finished` of `total` responses are there.  live: responses being decoded, by worker."""
        states = tuple(WorkerState.BUSY if count else WorkerState.IDLE for count in live)
        where = self.step, self._num_steps, phase
        self._show(Progress(*where, finished, total, sum(live), tokens, tokens_per_s, states, "responses"))


def in_words(now: Progress, *, elapsed_s: float, left_s: float | None) -> str:
    """One line: "rollout: step 3/12, 41/96 responses, 412 tok/s, about 0:21 left"."""
    words = [] if now.step is None else [f"step {now.step}/{now.num_steps}"]
    if now.total > 1:
        words.append(f"{now.finished}/{now.total} {now.unit}".rstrip())
    if now.tokens:
        words.append(f"{now.tokens_per_s:.0f} tok/s")
    elif now.total > 1 and now.finished and elapsed_s > 0:
        rate = now.finished / elapsed_s
        words.append(f"{rate:.1f} a second" if rate >= 1 else f"{1 / rate:.1f} s each")
    if now.note:
        words.append(now.note)
    words.append(f"{elapsed_s:.0f} s so far" if left_s is None else f"about {minutes(left_s)} left")
    return f"{now.phase}: {', '.join(words)}"


def minutes(seconds: float) -> str:
    """0:21, 12:05 or 1:02:05."""
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


_TELLING = 0.05  # of what there is to do: the first response of a phase says nothing about its rate


class PhaseClock:
    """How long the phase has taken so far, and how long it will still take.

    A phase that ran before is expected to take as long again: a rollout's longest responses end last, so the share done
    says little.  A new phase goes on at its rate so far.
    """

    def __init__(self) -> None:
        self._took_s: dict[tuple[str, int], float] = {}  # seconds of the newest phase of this name and size
        self._now: Progress | None = None
        self._began_s = 0.0

    def show(self, now: Progress, at_s: float) -> None:
        before = self._now
        if before is None or (before.step, before.phase, before.total) != (now.step, now.phase, now.total):
            if before is not None:
                self._took_s[before.phase, before.total] = at_s - self._began_s
            self._began_s = at_s
        self._now = now

    def elapsed_s(self, at_s: float) -> float:
        return at_s - self._began_s

    def left_s(self, at_s: float) -> float | None:
        """Seconds until the phase ends; None: unknown, or it takes longer than before."""
        if self._now is None:
            return None
        now, elapsed_s = self._now, self.elapsed_s(at_s)
        took_s = self._took_s.get((now.phase, now.total))
        if took_s is not None and took_s > elapsed_s:
            return took_s - elapsed_s
        if now.total > 1 and now.finished >= _TELLING * now.total:
            return elapsed_s * (now.total - now.finished) / now.finished
        return None
