"""Where a run is, as a file beside it: `runs/NAME/status.json`, written by the run, read by `tlt status`; and
`tlt report`: one run as one HTML file."""

import json
import logging
import os
import re
import socket
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from conf.load import ConfigError, load
from conf.run import RunConfig
from flows._logging import log_file
from flows._stopping import stopped_by
from tlt_core.items import checkpoint
from tlt_core.machine.getting_on import STACKS_WANTED
from tlt_core.run.progress import Progress, in_words, minutes
from tlt_core.run.summary import rows_of

log = logging.getLogger(__name__)

STATUS = "status.json"
RUNNING, FINISHED, FAILED, STOPPED = "running", "finished", "failed", "stopped"
_EVERY_S = 2.0
_RECENT = 5  # steps whose median tells how long the rest will take
_LOG_TAIL = 200_000  # bytes
_TROUBLE = re.compile(  # of log.txt or log.jsonl
    r'(\d{4}-\d\d-\d\d [\d:,]+ |\{"time": "[^"]*", "level": ")(WARNING|ERROR|CRITICAL)[ "]'
)


class StatusFile:
    """Writes the file: every two seconds at most, and at the end."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / STATUS
        self._written_s = 0.0
        self._phase, self._phase_began_s = "", time.time()
        self._last: dict[str, Any] = {}

    def show(self, now: Progress) -> None:
        phase = f"{now.step} {now.phase}"
        changed = phase != self._phase
        if changed:
            self._phase, self._phase_began_s = phase, time.time()
        if not changed and time.monotonic() - self._written_s < _EVERY_S:
            return
        self._last = {
            **now._asdict(),
            "worker_states": [state.name.lower() for state in now.worker_states],
            "phase_began": self._phase_began_s,
        }
        self._write(RUNNING)

    def end(self, error: BaseException | None) -> None:
        stopped = stopped_by(error) is not None
        text = "" if error is None or stopped else f"{type(error).__name__}: {error}"
        self._write(FINISHED if error is None else STOPPED if stopped else FAILED, error=text)

    def _write(self, state: str, *, error: str = "") -> None:
        self._written_s = time.monotonic()
        who = {"pid": os.getpid(), "host": socket.gethostname(), "started": psutil.Process().create_time()}
        content = {**self._last, "state": state, "error": error, "updated": time.time(), **who}
        partial = self._path.with_name(f".{STATUS}.partial")
        try:  # not flushed to the disk: after a power cut nobody needs it, and the rollout would wait for it
            partial.write_text(json.dumps(content))
            partial.replace(self._path)
        except OSError as error:  # a full disk must end the run when saving fails, not here
            log.debug("%s cannot be written: %s", self._path, error)


def status(run: str, *, stacks: bool) -> tuple[str, bool]:
    """What is known of the run, in lines, and whether all is well (it runs, or has finished).

    run: its folder or configuration file; empty: the newest run in `runs`.  stacks: ask the run for the stacks of its
    processes.  Raises ConfigError.
    """
    path = Path(run or _example())
    folder = load(path).run_dir if path.is_file() else path
    try:
        known = json.loads((folder / STATUS).read_text())
        alive = _is_alive(known)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{folder} has no readable {STATUS} ({type(error).__name__}): no run has begun there; name a run's folder, "
            f"such as {_example()}"
        ) from None
    state = known["state"]
    if state == RUNNING and alive is False:
        state = "dead"
    if stacks:
        if state != RUNNING:
            raise ConfigError(f"--stacks: {folder} is {state}; only a running run can write its stacks")
        (folder / STACKS_WANTED).parent.mkdir(exist_ok=True)
        (folder / STACKS_WANTED).touch()
    return "\n".join(f"{name:12}{text}" for name, text in _lines(folder, known, state)), state in (RUNNING, FINISHED)


def _is_alive(status: dict[str, Any]) -> bool | None:
    """Is the process that wrote the file still there?  None: it is on another machine."""
    if status["host"] != socket.gethostname():
        return None
    try:
        return abs(psutil.Process(status["pid"]).create_time() - status["started"]) < 1.0
    except psutil.NoSuchProcess:
        return False


def _lines(folder: Path, known: Mapping[str, Any], state: str) -> Iterator[tuple[str, str]]:
    began = datetime.fromtimestamp(known["started"]).strftime("%Y-%m-%d %H:%M:%S")
    yield "run", f"{folder}: {_STATES[state]} (process {known['pid']} on {known['host']}, started {began})"
    if known["error"]:
        yield "error", known["error"].splitlines()[0]
    rows = [row for row in rows_of(folder) if row["step"] > 0] if (folder / "metrics.jsonl").is_file() else []
    if state == RUNNING and "phase" in known:
        now = Progress(**{name: known[name] for name in Progress._fields if name != "worker_states"})
        yield "now", in_words(now, elapsed_s=time.time() - known["phase_began"], left_s=None)
        if known["worker_states"]:
            yield "workers", "  ".join(f"{rank} {name}" for rank, name in enumerate(known["worker_states"]))
        if rows and known["num_steps"]:
            yield "time left", _time_left(rows, known["num_steps"])
    if rows:
        yield "last step", _step(rows[-1])
    yield "checkpoint", _checkpoint(folder / "checkpoints")
    if trouble := _last_trouble(log_file(folder)):
        yield "last trouble", trouble


_STATES = {
    RUNNING: "running",
    FINISHED: "finished",
    STOPPED: "stopped by a signal; the same command goes on",
    FAILED: "failed; the same command goes on from the newest checkpoint",
    "dead": "its process died silently (killed, out of memory, power); the same command goes on",
}


def _time_left(rows: Sequence[Mapping[str, float]], num_steps: int) -> str:
    recent = [row["timing_s/step"] for row in rows[-_RECENT:]]
    left = num_steps - int(rows[-1]["step"])
    return f"about {minutes(left * statistics.median(recent))} for {left} steps (median of the last {len(recent)})"


def _step(row: Mapping[str, float]) -> str:
    parts = [f"{row['step']:.0f} in {row['timing_s/step']:.1f} s", f"reward {row['critic/rewards/mean']:.3f}"]
    if "rollout/spec_accept_length" in row:
        parts.append(f"accepted length {row['rollout/spec_accept_length']:.2f}")
    if "idle/idle_ratio" in row:
        parts.append(f"idle {row['idle/idle_ratio']:.0%} of the rollout")
    if "idle/harvested_ratio" in row:
        parts.append(f"{row['idle/harvested_ratio']:.0%} of that used")
    return ", ".join(parts)


def _checkpoint(root: Path) -> str:
    names = checkpoint.names(root)
    if not names:
        return "none yet"
    ago_s = time.time() - (root / names[-1]).stat().st_mtime
    return f"{names[-1]}, {minutes(ago_s)} ago; kept: {', '.join(str(int(n.split('_')[1])) for n in names)}"


def _last_trouble(log: Path | None) -> str:
    if log is None:
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LOG_TAIL))
        lines = file.read().decode(errors="replace").splitlines()
    found = [line for line in lines if _TROUBLE.match(line)]
    return found[-1] if found else ""


def report(run: str, *, out: Path | None) -> tuple[Path, str]:
    """Write the page; returns its path and the verdict.

    run: a run's folder, or a configuration file; out: default RUN/report.html.  Raises ConfigError.
    """
    run_dir, cfg = _find(run)
    from tasks.report_page import page
    from tlt_core.items.store import write_atomically
    from tlt_core.run.savings import savings

    rows = rows_of(run_dir)
    text = page(run_dir, cfg, rows)
    target = out or run_dir / "report.html"
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, lambda partial: partial.write_text(text, encoding="utf-8"))
    return target, savings(rows, cfg).verdict


def _find(run: str) -> tuple[Path, RunConfig]:
    """Folder and configuration of a run that has recorded something.  Raises ConfigError."""
    path = Path(run)
    if path.is_file():
        named = load(path)
        path = named.run_dir
        if not path.is_dir():
            raise ConfigError(f"{run}: its run has no folder {path} yet; begin it with 'tlt train {run}'")
    elif not path.is_dir():
        raise ConfigError(
            f"{run}: neither a folder nor a file; name a run's folder, such as {_example()}, or its configuration file"
        )
    missing = [name for name in ("config.yaml", "metrics.jsonl") if not (path / name).is_file()]
    if missing:
        raise ConfigError(
            f"{path} has no {' and no '.join(missing)}: it is not a run's folder, or its run has not ended a step; "
            f"name a run's folder, such as {_example()}, or go on with 'tlt train CONFIG'"
        )
    return path, load(path / "config.yaml")


def _example() -> str:
    """The newest run in `runs`, or how one is named."""
    runs = [path.parent for path in Path("runs").glob("*/metrics.jsonl")]
    return str(max(runs, key=lambda folder: folder.stat().st_mtime, default=Path("runs/demo")))
