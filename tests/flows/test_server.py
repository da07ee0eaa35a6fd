"""The private Prefect server comes back when it dies, and a run goes on meanwhile."""

import os
import signal
import time
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from flows._server import PrivateServer, answers

pytestmark = [pytest.mark.prefect, pytest.mark.slow]


def _servers(url: str) -> list[int]:
    """Process numbers of the servers at this address.  Other tests of this process leave servers of their own."""
    port = str(urlsplit(url).port)
    children = psutil.Process().children()
    return [child.pid for child in children if child.status() != psutil.STATUS_ZOMBIE and port in child.cmdline()]


def test_a_server_that_dies_is_started_again_at_its_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))
    with PrivateServer() as server:
        server.wait_ready()
        url = os.environ["PREFECT_API_URL"]
        for _ in range(2):
            (first,) = _servers(url)
            listening = [c for c in psutil.Process(first).net_connections() if c.status == psutil.CONN_LISTEN]
            assert {c.laddr.ip for c in listening} == {"127.0.0.1"}
            os.kill(first, signal.SIGKILL)
            deadline = time.monotonic() + 120
            while not (answers(url) and _servers(url) != [first]):
                assert time.monotonic() < deadline, "no server answers at the old address"
                time.sleep(0.1)
    assert not _servers(url)
    assert not answers(url)
