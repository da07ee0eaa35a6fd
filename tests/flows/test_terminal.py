"""Progress on a terminal, and where log lines go."""

import io
import logging
from pathlib import Path

import pytest
from rich.console import Console

from flows import _logging
from flows._terminal import Terminal
from tlt_core.items.types import WorkerState
from tlt_core.run.session import Progress

PROGRESS = Progress(
    step=3,
    num_steps=10,
    phase="rollout",
    finished=41,
    total=64,
    live=9,
    tokens=5000,
    tokens_per_s=412.4,
    worker_states=(WorkerState.BUSY, WorkerState.IDLE),
)


def _console(*, terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=120, color_system=None)


def test_a_terminal_shows_step_phase_rate_workers_and_the_last_reward() -> None:
    console = _console(terminal=True)
    with Terminal(console=console) as show:
        show.step_done({"critic/rewards/mean": 0.4123, "rollout/spec_accept_length": 2.5})
        show(PROGRESS)
        console.print(show._render())
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for words in (
        "step 3/10",
        "rollout",
        "41/64",
        "412 tok/s",
        "live 9",
        "reward 0.412",
        "accepted length 2.50",
        "worker 0 generating",
        "worker 1 idle",
    ):
        assert words in shown


def test_before_the_first_step_there_is_no_reward_to_show() -> None:
    console = _console(terminal=True)
    with Terminal(console=console) as show:
        show(PROGRESS)
        console.print(show._render())
    assert "reward -  accepted length -" in console.file.getvalue()  # type: ignore[attr-defined]


def test_nothing_is_drawn_where_there_is_no_terminal() -> None:
    console = _console(terminal=False)
    with Terminal(console=console) as show:
        show(PROGRESS)
        show.stage("cold start", 3, 9, 1.25)
    assert console.file.getvalue() == ""  # type: ignore[attr-defined]


def test_the_run_log_has_info_lines_and_the_traceback_of_what_ended_the_run(tmp_path: Path) -> None:
    def run() -> None:
        with _logging.run_log(tmp_path / "run"):
            logging.getLogger("tlt_core.run.session").info("resuming from %s", "step_000002")
            logging.getLogger("some.library").info("chatter")
            raise RuntimeError("a worker died")

    with pytest.raises(RuntimeError):
        run()
    text = (tmp_path / "run" / "log.txt").read_text()
    assert "INFO    tlt_core.run.session:  resuming from step_000002" in text
    assert "chatter" not in text
    assert "Traceback" in text
    assert "RuntimeError: a worker died" in text
    logging.getLogger("tlt_core").warning("after the run")
    assert "after the run" not in (tmp_path / "run" / "log.txt").read_text()


@pytest.mark.parametrize(
    ("name", "level", "shown"),
    [
        ("tasks.track", logging.INFO, True),
        ("tlt_core.run.session", logging.WARNING, True),
        ("httpx", logging.INFO, False),
        ("mlflow", logging.WARNING, True),
        ("prefect.task_runs", logging.ERROR, False),  # the command reports it, without a traceback
        ("prefect.flow_runs", logging.ERROR, False),
        ("prefect", logging.INFO, False),
        ("prefect.client", logging.WARNING, True),
    ],
)
def test_what_the_terminal_shows(name: str, level: int, shown: bool) -> None:
    record = logging.LogRecord(name, level, __file__, 1, "text", (), None)
    assert _logging.shown_on_terminal(record) is shown


def test_a_full_disk_under_the_log_is_not_reported_line_by_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    handler = _logging._RunLogHandler(tmp_path / "log.txt")

    def full() -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(handler, "flush", full)
    handler.handle(logging.LogRecord("x", logging.INFO, __file__, 1, "text", (), None))
    monkeypatch.undo()
    handler.close()
    assert capsys.readouterr().err == ""
