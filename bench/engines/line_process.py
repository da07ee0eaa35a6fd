"""A process that is asked with a line of JSON and answers with one; see `processes/process.py`."""

import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.engines.environment import PeerError

_STOP_S = 20.0
_LOG_LINES = 15


class LineProcess:
    """With a process group of its own, and its other output in a file."""

    def __init__(self, name: str, command: Sequence[str], *, environment: Mapping[str, str], log: Path) -> None:
        self._name, self._log = name, log
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                command,
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
                text=True,
            )

    def ask(self, value: Mapping[str, Any]) -> dict[str, Any]:
        """Say a line and wait for the answer.  Raises PeerError with the end of the log when the process has ended."""
        assert self._process.stdin is not None, "opened as a pipe"
        assert self._process.stdout is not None, "opened as a pipe"
        try:
            self._process.stdin.write(json.dumps(dict(value)) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            end = "\n".join(self._log.read_text(errors="replace").splitlines()[-_LOG_LINES:])
            raise PeerError(f"{self._name} ended; the end of {self._log}:\n{end}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def signal(self, sign: signal.Signals) -> None:
        """To the process and all that it started.  If it has ended, the next `ask` says so."""
        try:
            os.killpg(self._process.pid, sign)
        except ProcessLookupError:
            return

    def close(self) -> None:
        """End the process and all that it started."""
        for sign in (signal.SIGCONT, signal.SIGTERM):
            self.signal(sign)
        try:
            self._process.communicate(timeout=_STOP_S)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            self._process.communicate()
