"""A private Prefect server for one command, where none is configured.  It ends with the command, even after a kill.

    command ---- starts ----> python -m flows._server ---- becomes ----> uvicorn, prefect's server
       |                                                                     ^
       +---- waits until it answers, sets PREFECT_API_URL                    |
       +---- terminates it; when the command is killed, the kernel does -----+

A server that Prefect starts itself would outlive `kill -9` of its parent, and Ctrl-C would reach it.
"""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import closing
from pathlib import Path

_START_S = 180.0  # enough for a busy machine that creates the database
_PR_SET_PDEATHSIG = 1  # linux/prctl.h: the signal that a child gets when its parent dies


class ServerError(RuntimeError):
    """The private server did not start.  The text says where its output is."""


class PrivateServer:
    """Context manager.  The start takes seconds: import what the flow needs, then call `wait_ready`."""

    def __init__(self) -> None:
        self._home = Path(os.environ["PREFECT_HOME"])
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "PrivateServer":
        if not self._is_configured():
            self._home.mkdir(parents=True, exist_ok=True)
            self._start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            from prefect.logging.handlers import APILogHandler

            APILogHandler().flush()  # each line that is still queued would complain that the server is gone
            self._process.terminate()
            try:
                self._process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            del os.environ["PREFECT_API_URL"]

    def wait_ready(self) -> None:
        """Return when the server answers.  Raises ServerError."""
        deadline = time.monotonic() + _START_S
        while self._process is not None and not answers(os.environ["PREFECT_API_URL"]):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise ServerError(
                    f"Prefect's private server did not start; its output is in {self._home / 'server.log'}.  Remove "
                    f"{self._home} if another version of Prefect made it, or start a server ('prefect server start') "
                    "and set PREFECT_API_URL"
                )
            time.sleep(0.1)

    def _is_configured(self) -> bool:
        """Whether the environment or a Prefect profile names a server."""
        profiles = self._home / "profiles.toml"
        return "PREFECT_API_URL" in os.environ or (profiles.is_file() and "PREFECT_API_URL" in profiles.read_text())

    def _start(self) -> None:
        with closing(socket.socket()) as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        with (self._home / "server.log").open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "flows._server", str(port), str(os.getpid())],
                env={**os.environ, "PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1"},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        os.environ["PREFECT_API_URL"] = f"http://127.0.0.1:{port}/api"


def answers(url: str) -> bool:
    """Whether a Prefect server answers at this address of its API."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as response:
            return bool(json.load(response) is True)
    except (OSError, ValueError):
        return False


def _become_server(port: str, parent: int) -> None:
    """In the child process: die with the parent, and become the server."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:  # Linux
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the call
        return
    command = [sys.executable, "-m", "uvicorn", "--factory", "prefect.server.api.server:create_app", "--lifespan", "on"]
    os.execv(sys.executable, [*command, "--host", "127.0.0.1", "--port", port, "--log-level", "error"])


if __name__ == "__main__":
    _become_server(sys.argv[1], int(sys.argv[2]))
