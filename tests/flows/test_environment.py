"""What a command's environment does to the libraries in it: proxies, a Prefect server elsewhere."""

import http.server
import os
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import requests
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows import _environment, _server

_NOBODY = "http://127.0.0.1:9"  # the port of `discard`


class _True(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"true")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Of a server here that says true."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _True) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As it was afterwards."""
    for name in (*os.environ, "no_proxy", "NO_PROXY", "TQDM_DISABLE", *_environment._DEFAULTS, "PREFECT_HOME"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
        if not os.environ[name]:
            monkeypatch.delenv(name)
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(urllib.request, "_opener", None)  # it keeps the proxies of its first use
    return monkeypatch


@pytest.mark.parametrize(
    ("proxy", "given"),
    [("http_proxy", ""), ("HTTP_PROXY", "intranet.example"), ("ALL_PROXY", "intranet.example, 127.0.0.1")],
)
def test_services_of_this_machine_are_not_asked_for_at_the_proxy(
    environment: pytest.MonkeyPatch, proxy: str, given: str, port: int
) -> None:
    environment.setenv(proxy, _NOBODY)
    if given:
        environment.setenv("NO_PROXY", given)
    _environment.set_defaults()
    for host in ("127.0.0.1", "localhost"):
        assert _server.answers(f"http://{host}:{port}/api")
        assert requests.get(f"http://{host}:{port}", timeout=5).json() is True
        assert httpx.get(f"http://{host}:{port}").json() is True
    assert urllib.request.proxy_bypass_environment("intranet.example") == bool(given)
    assert os.environ["no_proxy"] == os.environ["NO_PROXY"]
    assert os.environ["no_proxy"].count("127.0.0.1") == 1


def test_a_user_who_wants_no_proxy_at_all_gets_none(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("no_proxy", "*")
    _environment.set_defaults()
    assert (os.environ["no_proxy"], os.environ["NO_PROXY"]) == ("*", "*")


def test_a_configured_server_that_is_not_there_is_said_in_one_paragraph(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    monkeypatch.setenv("PREFECT_API_URL", f"{_NOBODY}/api")
    monkeypatch.setattr(_server, "_CONFIGURED_S", 0.5)
    said = rf"no Prefect server answers at PREFECT_API_URL={_NOBODY}/api; start it .* or unset the variable"
    with (
        temporary_settings({PREFECT_API_URL: f"{_NOBODY}/api"}),
        _server.PrivateServer() as server,
        pytest.raises(_server.ServerError, match=said),
    ):
        server.wait_ready()
