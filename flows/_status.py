"""Where a run is, as a file beside it: `runs/NAME/status.json`, written by the run, read by `tlt status`."""

import json
import logging
import os
import socket
import time
from pathlib import Path
from typing import Any

import psutil

from flows._stopping import stopped_by
from tlt_core.run.progress import Progress

log = logging.getLogger(__name__)

STATUS = "status.json"
RUNNING, FINISHED, FAILED, STOPPED = "running", "finished", "failed", "stopped"
_EVERY_S = 2.0


class StatusFile:
    """Writes the file: every two seconds at most, and at the end."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / STATUS
        self._written_s = 0.0
        self._phase, self._phase_began_s = "", time.time()
        self._last: dict[str, Any] = {}

    def show(self, now: Progress) -> None:
        """Take the run's progress."""
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
        """The run ends."""
        stopped = stopped_by(error) is not None
        text = "" if error is None or stopped else f"{type(error).__name__}: {error}"
        self._write(FINISHED if error is None else STOPPED if stopped else FAILED, error=text)

    def _write(self, state: str, *, error: str = "") -> None:
        self._written_s = time.monotonic()
        content = {**self._last, "state": state, "error": error, "updated": time.time(), **_process()}
        partial = self._path.with_name(f".{STATUS}.partial")
        try:  # not flushed to the disk: after a power cut nobody needs it, and the rollout would wait for it
            partial.write_text(json.dumps(content))
            partial.replace(self._path)
        except OSError as error:  # a full disk must end the run when saving fails, not here
            log.debug("%s cannot be written: %s", self._path, error)


def _process() -> dict[str, Any]:
    return {"pid": os.getpid(), "host": socket.gethostname(), "started": psutil.Process().create_time()}


def is_alive(status: dict[str, Any]) -> bool | None:
    """Is the process that wrote the file still there?  None: it is on another machine."""
    if status["host"] != socket.gethostname():
        return None
    try:
        return abs(psutil.Process(status["pid"]).create_time() - status["started"]) < 1.0
    except psutil.NoSuchProcess:
        return False
