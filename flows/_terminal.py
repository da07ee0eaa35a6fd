"""Live progress on a terminal: one display that is redrawn.  Elsewhere a log line after some silence.

    step 3/10  rollout  ########------  41/64   412 tok/s  live 9   0:21   about 0:12 left
    reward 0.412  accepted length -      worker 0 generating   worker 1 idle

    rollout: step 3/10, 41/64 responses, 412 tok/s, about 0:12 left

In: `Progress` several times a second from the session, the metrics of a finished step from the flow.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from flows._heartbeat import Heartbeat
from flows._logging import is_json
from flows.status import StatusFile
from tlt_core.items.types import WorkerState
from tlt_core.run.progress import PhaseClock, Progress, in_words, minutes

_STATES = {
    WorkerState.BUSY: ("generating", "blue"),
    WorkerState.IDLE: ("idle", "bright_black"),
    WorkerState.TRAINING: ("training drafter", "green"),
    WorkerState.UPDATING: ("updating", "yellow"),
    WorkerState.STREAMING: ("updating early", "bright_yellow"),
}


class Terminal:
    """Context manager.  `Session` calls the instance with its progress."""

    def __init__(
        self, run_dir: Path | None = None, *, console: Console | None = None, quiet_s: float | None = None
    ) -> None:
        """run_dir: where `tlt status` finds the progress.  quiet_s: see `Heartbeat`."""
        self._status = None if run_dir is None else StatusFile(run_dir)
        self._console = console or Console(stderr=True, force_terminal=False if is_json() else None)
        self._progress: Progress | None = None
        self._began_s = time.monotonic()
        self._clock = PhaseClock()
        self._last_step: dict[str, float] = {}
        self._heartbeat = Heartbeat(self._sentence, quiet_s=quiet_s)
        self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=4, transient=True)

    def __enter__(self) -> "Terminal":
        if self._console.is_terminal:
            self._live.start()
        else:
            self._heartbeat.__enter__()
        return self

    def __exit__(self, error_type: type | None, error: BaseException | None, trace: object) -> None:
        if self._status is not None:
            self._status.end(error)
        if self._console.is_terminal:
            self._live.stop()
        else:
            self._heartbeat.__exit__(error_type, error, trace)

    def __call__(self, progress: Progress) -> None:
        self._clock.show(progress, time.monotonic())
        self._progress = progress
        if self._status is not None:
            self._status.show(progress)

    def stage(self, phase: str, done: int, total: int, loss: float | None) -> None:
        """Show the progress of a stage outside the RL loop: cold start, first drafter."""
        self(Progress(None, 0, phase, done, total, note="" if loss is None else f"loss {loss:.3f}"))

    def begin(self, phase: str) -> None:
        self(Progress(None, 0, phase, 0, 1))

    def step_done(self, metrics: Mapping[str, float]) -> None:
        self._last_step = dict(metrics)

    def _render(self) -> Any:
        if self._progress is None:
            return Text("starting ...", style="bright_black")
        return Group(self._phase_line(self._progress), self._state_line(self._progress))

    def _sentence(self) -> str:
        now_s = time.monotonic()
        if self._progress is None:
            return f"starting: {now_s - self._began_s:.0f} s so far"
        return in_words(self._progress, elapsed_s=self._clock.elapsed_s(now_s), left_s=self._clock.left_s(now_s))

    def _phase_line(self, now: Progress) -> Table:
        line = Table.grid(padding=(0, 2))
        now_s = time.monotonic()
        cells: list[Any] = [] if now.step is None else [Text(f"step {now.step}/{now.num_steps}", style="bold")]
        cells.append(f"{now.phase}, {now.note}" if now.note else now.phase)
        if now.total > 1:
            cells += [ProgressBar(total=now.total, completed=now.finished, width=24), f"{now.finished}/{now.total}"]
        if now.tokens:
            cells += [f"{now.tokens_per_s:.0f} tok/s", f"live {now.live}"]
        cells.append(minutes(self._clock.elapsed_s(now_s)))
        left_s = self._clock.left_s(now_s)
        if left_s is not None:
            cells.append(f"about {minutes(left_s)} left")
        line.add_row(*cells)
        return line

    def _state_line(self, now: Progress) -> Text:
        reward = self._last_step.get("critic/rewards/mean")
        accepted = self._last_step.get("rollout/spec_accept_length")
        line = Text(f"reward {'-' if reward is None else f'{reward:.3f}'}")
        line.append(f"  accepted length {'-' if accepted is None else f'{accepted:.2f}'}  ")
        for worker, state in enumerate(now.worker_states):
            name, style = _STATES[state]
            line.append(f"  worker {worker} ").append(name, style=style)
        return line
