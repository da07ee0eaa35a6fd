"""Live progress on a terminal: one display that is redrawn; nothing at all where stderr is not a terminal.

    step 3/10  rollout  ########------  41/64 responses   412 tok/s  live 9   0:00:21
    reward 0.412  accepted length -      worker 0 generating   worker 1 idle

In: `Progress` several times a second from the session, the metrics of a finished step from the flow.
"""

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tlt_core.progress import Progress
from tlt_core.types import WorkerState

_STATES = {
    WorkerState.BUSY: ("generating", "blue"),
    WorkerState.IDLE: ("idle", "bright_black"),
    WorkerState.TRAINING: ("training drafter", "green"),
    WorkerState.UPDATING: ("updating", "yellow"),
}


class Terminal:
    """Context manager; an instance is also what `Session` calls with its progress."""

    def __init__(self, *, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._progress: Progress | None = None
        self._phase_began_s = time.monotonic()
        self._last_step: dict[str, float] = {}
        self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=4, transient=True)

    def __enter__(self) -> "Terminal":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def __call__(self, progress: Progress) -> None:
        """Show where the step is."""
        if self._progress is None or progress.phase != self._progress.phase:
            self._phase_began_s = time.monotonic()
        self._progress = progress

    def stage(self, phase: str, done: int, total: int, loss: float) -> None:
        """Show where a stage outside the RL loop is (cold start)."""
        self(Progress(done, total, f"{phase}, loss {loss:.3f}", done, total, 0, 0, 0.0, ()))

    def step_done(self, metrics: Mapping[str, float]) -> None:
        """Numbers of the step that has just ended."""
        self._last_step = dict(metrics)

    def _render(self) -> Any:
        if self._progress is None:
            return Text("starting ...", style="bright_black")
        return Group(self._phase_line(self._progress), self._state_line(self._progress))

    def _phase_line(self, now: Progress) -> Table:
        line = Table.grid(padding=(0, 2))
        elapsed_s = int(time.monotonic() - self._phase_began_s)
        cells: list[Any] = [Text(f"step {now.step}/{now.num_steps}", style="bold"), now.phase]
        if now.total > 1:
            cells += [ProgressBar(total=now.total, completed=now.finished, width=24), f"{now.finished}/{now.total}"]
        if now.tokens:
            cells += [f"{now.tokens_per_s:.0f} tok/s", f"live {now.live}"]
        line.add_row(*cells, f"{elapsed_s // 60}:{elapsed_s % 60:02d}")
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
