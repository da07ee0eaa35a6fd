"""The engines that ours is compared with: their environments, made when they are first needed, and their processes.

artifacts/peers/NAME-DIGEST/        DIGEST: of the pinned packages, so that a changed pin makes a new environment
    bin/python ...
    .made                           written last: without it the environment is made again
"""

import contextlib
import hashlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tlt_core.machine import file_lock
from tlt_core.machine.huge_pages import tunables

_MADE = ".made"
_ERROR_CHARACTERS = 300
_STOP_S = 20.0
_LOG_LINES = 15

_log = logging.getLogger(__name__)


class PeerError(Exception):
    """A peer cannot be measured here.  The text says why."""


class Peer(NamedTuple):
    """What to install.  Peer("llama.cpp", ("xllamacpp==1.2.3",))"""

    name: str
    packages: tuple[str, ...]


def interpreter(peer: Peer, under: Path) -> Path:
    """Python of the peer's environment in the folder `under`, which is made if it is missing.  Raises PeerError."""
    digest = hashlib.sha256(repr((peer, sys.version_info[:2])).encode()).hexdigest()[:12]
    folder = (under / f"{peer.name}-{digest}").absolute()
    python = folder / "bin" / "python"
    try:
        with file_lock.exclusive(under / f".{folder.name}.lock", wait=True):
            if not (folder / _MADE).is_file():
                _log.info("making the environment of %s in %s, once", peer.name, folder)
                _make(peer, folder, python)
    except OSError as error:
        raise PeerError(f"the environment {folder} cannot be made: {error}") from None
    return python


def variables(*, threads: int) -> dict[str, str]:
    """Environment variables for a peer's process: ours, without those that lead to our packages."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return kept | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"} | tunables()


def run(command: list[str], *, purpose: str) -> None:
    """Run a command.  Raises PeerError with the end of its output if it fails."""
    done = subprocess.run(
        command, env=variables(threads=1), stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
    )
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())[-_ERROR_CHARACTERS:]
        raise PeerError(f"{purpose} failed (exit code {done.returncode}): {said}")


def _make(peer: Peer, folder: Path, python: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # remains of an interrupted process
    purpose = f"making the environment of {peer.name}"
    run([sys.executable, "-m", "venv", str(folder)], purpose=purpose)
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    run([*install, *peer.packages], purpose=purpose)
    (folder / _MADE).touch()


class LineProcess:
    """A process that is asked with a line of JSON and answers with one; see `processes/process.py`.

    It has a process group of its own, and its other output is in a file.
    """

    def __init__(self, name: str, command: Sequence[str], *, environment: Mapping[str, str], log: Path) -> None:
        self._name, self._log = name, log
        pipe = subprocess.PIPE
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                command, env=environment, stdin=pipe, stdout=pipe, stderr=stderr, start_new_session=True, text=True
            )

    def ask(self, value: Mapping[str, Any]) -> dict[str, Any]:
        """Say a line and wait for the answer.  Raises PeerError with the end of the log when the process has ended."""
        assert self._process.stdin is not None, "opened as a pipe"
        assert self._process.stdout is not None, "opened as a pipe"
        try:
            self._process.stdin.write(json.dumps(value) + "\n")
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
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, sign)

    def close(self) -> None:
        for sign in (signal.SIGCONT, signal.SIGTERM):
            self.signal(sign)
        try:
            self._process.communicate(timeout=_STOP_S)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            self._process.communicate()
