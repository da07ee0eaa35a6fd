"""A private Prefect server for one command, where none is configured.

The command starts `python -m flows._server`, which becomes uvicorn with Prefect's server; it waits until that answers,
and starts it again at the same address when it dies.  Unlike the server that Prefect starts by itself (ephemeral mode)
it ends with the command, even after a kill; Ctrl-C does not reach it, so a stopped run can still say how it ended; and
it starts while the flow's modules are imported, which hides most of its seconds.
"""

import ctypes
import json
import logging
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import closing
from pathlib import Path

from conf.system import without_password

log = logging.getLogger(__name__)

_START_S = 180.0  # enough for a busy machine that creates the database
_CONFIGURED_S = 30.0  # for one that somebody else is just starting
_LOOK_S = 0.2  # between two looks whether it still runs
_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 60.0  # before it is started again; doubled each time
_PR_SET_PDEATHSIG = 1  # linux/prctl.h: the signal that a child gets when its parent dies


class ServerError(RuntimeError):
    """The private server did not start.  The text says where its output is."""


class PrivateServer:
    """Context manager.  The start takes seconds: import what the flow needs, then call `wait_ready`."""

    def __init__(self) -> None:
        self._home = Path(os.environ["PREFECT_HOME"])
        self._process: subprocess.Popen[bytes] | None = None
        self._command: list[str] = []
        self._is_closing = threading.Event()
        self._guard = threading.Thread(target=self._keep_alive, name="guard of Prefect's server", daemon=True)

    def __enter__(self) -> "PrivateServer":
        profiles = self._home / "profiles.toml"  # an environment variable or a Prefect profile may name a server
        named_there = profiles.is_file() and "PREFECT_API_URL" in profiles.read_text()
        if "PREFECT_API_URL" not in os.environ and not named_there:
            self._home.mkdir(parents=True, exist_ok=True)
            self._start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            from prefect.logging.handlers import APILogHandler

            APILogHandler().flush()  # each line that is still queued would complain that the server is gone
            self._is_closing.set()
            self._process.terminate()
            try:
                self._process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            if self._guard.is_alive():
                self._guard.join()  # a server that it has just started ends with it: see `_become_server`
            del os.environ["PREFECT_API_URL"]

    def wait_ready(self) -> None:
        """Return when the server answers; from then on a private one is started again when it ends.

        Raises ServerError.  Import Prefect first, whose settings name the server that is not private.
        """
        if self._process is None:
            _wait_for_configured()
            return
        deadline = time.monotonic() + _START_S
        while not answers(os.environ["PREFECT_API_URL"]):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise ServerError(
                    f"Prefect's private server did not start; its output is in {self._home / 'server.log'}.  Remove "
                    f"{self._home} if another version of Prefect made it, or start a server ('prefect server start') "
                    "and set PREFECT_API_URL"
                )
            time.sleep(0.1)
        self._guard.start()

    def _start(self) -> None:
        with closing(socket.socket()) as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._command = [sys.executable, "-m", "flows._server", str(port), str(os.getpid())]
        (self._home / "server.log").unlink(missing_ok=True)
        self._process = self._launch()
        os.environ["PREFECT_API_URL"] = f"http://127.0.0.1:{port}/api"

    def _launch(self) -> "subprocess.Popen[bytes]":
        with (self._home / "server.log").open("a") as output:
            return subprocess.Popen(
                self._command,
                env={**os.environ, "PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1"},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def _keep_alive(self) -> None:
        """Start the server again whenever it ends early.  Prefect's client tries again in the meantime."""
        pause_s = _PAUSE_S
        while not self._is_closing.wait(_LOOK_S):
            if self._process is None or self._process.poll() is None:
                continue
            log.warning(
                "Prefect's private server ended (exit code %d); it is started again.  Its output is in %s",
                self._process.returncode,
                self._home / "server.log",
            )
            if not self._is_closing.wait(pause_s):
                self._process = self._launch()
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def answers(url: str) -> bool:
    """Whether a Prefect server answers at this address of its API."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as response:
            return bool(json.load(response) is True)
    except (OSError, ValueError):
        return False


def _wait_for_configured() -> None:
    """Raises ServerError when nothing is at the address that the environment or a profile gives."""
    from prefect.settings import PREFECT_API_URL

    url, deadline = PREFECT_API_URL.value(), time.monotonic() + _CONFIGURED_S
    while url and not _is_there(url):
        if time.monotonic() > deadline:
            raise ServerError(
                f"no Prefect server answers at PREFECT_API_URL={without_password(url)}; start it ('tlt deploy' or "
                "'prefect server start'), or unset the variable (and the setting in Prefect's profile): then the "
                "command has a private server"
            )
        time.sleep(0.5)


def _is_there(url: str) -> bool:
    """Whether anything speaks HTTP there.  Whether it lets us in is Prefect's matter, which has its keys."""
    try:
        urllib.request.urlopen(f"{url}/health", timeout=5).close()
    except urllib.error.URLError as error:
        return isinstance(error, urllib.error.HTTPError) or isinstance(error.reason, ssl.SSLError)
    except OSError:
        return False
    return True


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
