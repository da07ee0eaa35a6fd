"""`tlt status`: what a run writes about itself, and what is made of it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conf.load import ConfigError
from flows._stopping import Stopping
from flows._terminal import Terminal
from flows.status import STATUS, StatusFile, status
from tlt_core.items.types import WorkerState
from tlt_core.machine.getting_on import STACKS_WANTED
from tlt_core.run.progress import Progress

NOW = Progress(3, 8, "rollout", 41, 96, 9, 800, 412.0, (WorkerState.BUSY, WorkerState.IDLE), "responses")


def _lines(run_dir: Path) -> tuple[dict[str, str], bool]:
    text, is_well = status(str(run_dir), stacks=False)
    return {line[:12].strip(): line[12:] for line in text.splitlines()}, is_well


def _row(step: int, step_s: float) -> str:
    row = {"step": step, "timing_s/step": step_s, "critic/rewards/mean": 0.25, "idle/idle_ratio": 0.5}
    return json.dumps(row) + "\n"


def test_a_running_run_is_described_with_phase_workers_and_time_left(tmp_path: Path) -> None:
    StatusFile(tmp_path).show(NOW)
    (tmp_path / "metrics.jsonl").write_text(_row(1, 90.0) + _row(2, 10.0) + _row(3, 30.0))
    (tmp_path / "checkpoints" / "step_000002").mkdir(parents=True)
    (tmp_path / "log.txt").write_text(
        "2026-11-25 21:00:00,000 WARNING tasks.outbox:  MLflow failed\n2026-11-25 21:00:01,000 INFO    x:  fine\n"
    )
    lines, is_well = _lines(tmp_path)
    assert is_well
    assert f"running (process {os.getpid()} on " in lines["run"]
    assert lines["now"].startswith("rollout: step 3/8, 41/96 responses, 412 tok/s, ")
    assert lines["workers"] == "0 busy  1 idle"
    assert lines["time left"] == "about 2:30 for 5 steps (median of the last 3)"
    assert lines["last step"] == "3 in 30.0 s, reward 0.250, idle 50% of the rollout"
    assert lines["checkpoint"].startswith("step_000002, 0:0")
    assert lines["last trouble"].endswith("MLflow failed")


@pytest.mark.parametrize(
    ("error", "said"),
    [(None, "finished"), (KeyboardInterrupt(), "stopped by a signal"), (RuntimeError("worker 1 died\nlong"), "failed")],
)
def test_an_ended_run_says_how(tmp_path: Path, error: BaseException | None, said: str) -> None:
    terminal = Terminal(tmp_path, quiet_s=60.0)
    terminal.__enter__()
    terminal(NOW)
    terminal.__exit__(type(error), error, None)
    lines, is_well = _lines(tmp_path)
    assert is_well is (error is None)
    assert said in lines["run"]
    assert lines.get("error") == ("RuntimeError: worker 1 died" if isinstance(error, RuntimeError) else None)
    assert "now" not in lines


def test_a_run_whose_process_is_gone_is_called_dead_unless_it_is_elsewhere(tmp_path: Path) -> None:
    imports = "import sys; from pathlib import Path; from tests.flows.test_status import NOW, StatusFile"
    code = f"{imports}; StatusFile(Path(sys.argv[1])).show(NOW)"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=120)
    lines, is_well = _lines(tmp_path)
    assert not is_well
    assert "its process died silently" in lines["run"]
    known = json.loads((tmp_path / STATUS).read_text())
    (tmp_path / STATUS).write_text(json.dumps({**known, "host": "elsewhere"}))
    assert _lines(tmp_path)[1]


def test_progress_is_written_at_most_every_two_seconds_but_a_new_phase_at_once(tmp_path: Path) -> None:
    file = StatusFile(tmp_path)
    for now in (
        NOW,
        NOW._replace(finished=50),
        NOW._replace(phase="update"),
        NOW._replace(phase="update", finished=60),
    ):
        file.show(now)
    known = json.loads((tmp_path / STATUS).read_text())
    assert (known["phase"], known["finished"]) == ("update", 41)


def test_stacks_are_asked_for_of_a_running_run_alone(tmp_path: Path) -> None:
    file = StatusFile(tmp_path)
    file.show(NOW)
    status(str(tmp_path), stacks=True)
    assert (tmp_path / STACKS_WANTED).exists()
    file.end(None)
    with pytest.raises(ConfigError, match="only a running run"):
        status(str(tmp_path), stacks=True)


@pytest.mark.parametrize("content", [None, "{torn", '{"state": "running"}'])
def test_a_folder_without_a_readable_status_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / STATUS).write_text(content)
    with pytest.raises(ConfigError, match="no run has begun there"):
        status(str(tmp_path), stacks=False)


def test_what_prefect_raises_while_it_notes_a_signal_is_the_signal() -> None:
    """Prefect 3.8.8: ValueError("Task run is not set"), where a signal comes as a task begins."""

    def task() -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise ValueError("Task run is not set")  # noqa: B904 (as Prefect does)

    with pytest.raises(KeyboardInterrupt), Stopping():
        task()
    with pytest.raises(ValueError, match="of its own"), Stopping():
        raise ValueError("of its own")
