"""Progress on a terminal, and where log lines go."""

import contextlib
import io
import logging

import pytest
from rich.console import Console

from flows import _logging
from flows._terminal import Terminal
from tlt_core.items.types import WorkerState
from tlt_core.run.session import Progress

PROGRESS = Progress(3, 10, "rollout", 41, 64, 9, 5000, 412.4, (WorkerState.BUSY, WorkerState.IDLE))


def _shown(*, terminal: bool) -> str:
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=120, color_system=None)
    with Terminal(console=console) as show:
        show(PROGRESS)
        if terminal:
            console.print(show._render())
            show.step_done({"critic/rewards/mean": 0.4123, "rollout/spec_accept_length": 2.5})
            console.print(show._render())
    return output.getvalue()


def test_a_terminal_shows_step_phase_rate_workers_and_the_last_reward_and_a_file_gets_nothing() -> None:
    shown = _shown(terminal=True)
    for words in ("step 3/10", "rollout", "41/64", "412 tok/s", "live 9", "worker 0 generating", "worker 1 idle"):
        assert words in shown
    assert "reward -  accepted length -" in shown
    assert "reward 0.412  accepted length 2.50" in shown
    assert _shown(terminal=False) == ""


def test_what_the_terminal_shows() -> None:
    for name, level, shown in (
        ("tasks.track", logging.INFO, True),
        ("httpx", logging.INFO, False),
        ("mlflow", logging.WARNING, True),
        ("prefect.task_runs", logging.ERROR, False),  # the command reports it, without a traceback
        ("prefect", logging.INFO, False),
    ):
        record = logging.LogRecord(name, level, __file__, 1, "text", (), None)
        assert _logging.shown_on_terminal(record) is shown, name


def test_a_full_disk_under_the_log_is_not_reported_line_by_line(capsys: pytest.CaptureFixture[str]) -> None:
    handler = _logging._RunLogHandler("/dev/full", encoding="utf-8")
    handler.handle(logging.LogRecord("x", logging.INFO, __file__, 1, "text", (), None))
    with contextlib.suppress(OSError):
        handler.close()
    assert capsys.readouterr().err == ""
