"""A background process that outlives the command that started it: Prefect has this for its server, not for workers.

FOLDER/NAME.pid     pid and start time, so that another process with the same pid is not taken for ours
FOLDER/NAME.log     its output
"""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil


class Daemon:
    """One named background process of this folder."""

    def __init__(self, name: str, *, folder: Path) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self._pid_file = folder / f"{name}.pid"

    def process(self) -> psutil.Process | None:
        """The process, if it is alive."""
        try:
            pid, started = self._pid_file.read_text().split()
            process = psutil.Process(int(pid))
            alive = process.create_time() == float(started) and process.status() != psutil.STATUS_ZOMBIE
        except (FileNotFoundError, ValueError, psutil.NoSuchProcess):  # ValueError: a half-written file
            return None
        return process if alive else None

    def start(self, arguments: Sequence[str], *, env: Mapping[str, str]) -> psutil.Process:
        """Start `python ARGUMENTS` in a session of its own, out of reach of the terminal's Ctrl-C."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("a") as log:
            started = subprocess.Popen(
                [sys.executable, *arguments], env=dict(env), stdout=log, stderr=log, start_new_session=True
            )
        process = psutil.Process(started.pid)
        self._pid_file.write_text(f"{process.pid} {process.create_time()}\n")
        return process

    def stop(self, *, patience_s: float) -> list[psutil.Process]:
        """Terminate the process, and kill it after `patience_s`; returns its descendants, which are left alone."""
        process = self.process()
        if process is None:
            self._pid_file.unlink(missing_ok=True)
            return []
        children = process.children(recursive=True)
        end([process], patience_s=patience_s)
        self._pid_file.unlink(missing_ok=True)
        return children

    def last_lines(self) -> str:
        """The end of its output, for an error message."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-8:])


def end(processes: Sequence[psutil.Process], *, patience_s: float) -> None:
    """SIGTERM, and SIGKILL for processes that are alive after `patience_s`."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    _, alive = psutil.wait_procs(processes, timeout=patience_s)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=10)
