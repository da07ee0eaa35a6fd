"""A Prefect server and a worker of their own with the project's deployments, as `tlt deploy` makes them."""

import contextlib
import http.server
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import yaml

from flows.deploy import Daemon

FILE = Path("prefect.yaml")
TIMEOUT_S = 1200.0


class Deployed(NamedTuple):
    """Server, worker, and the folder with their state."""

    root: Path
    port: int
    env: dict[str, str]

    def run(self, *command: str, **variables: str) -> str:
        """A Python module with arguments."""
        words = [sys.executable, "-m", *command]
        done = subprocess.run(words, env=self.env | variables, capture_output=True, text=True, timeout=TIMEOUT_S)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def tlt(self, *arguments: str) -> str:
        return self.run("flows.cli", *arguments)

    def prefect(self, *arguments: str) -> str:
        return self.run("prefect", "--no-prompt", *arguments, PREFECT_API_URL=self.url)

    def up(self) -> None:
        self.tlt("deploy", "--port", str(self.port), "--file", str(self.root / "prefect.yaml"))

    def worker_alone(self) -> None:
        """A worker that nobody has told of lost runs, as on another machine."""
        project = str(Path.cwd())
        env = self.env | {"PREFECT_API_URL": self.url, "TLT_PROJECT": project, "PYTHONPATH": project}
        env |= {"PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30"}
        command = ["-m", "prefect", "worker", "start", "--pool", "tlt", "--type", "process"]
        Daemon("worker", folder=self.root / "prefect").start(command, env=env)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/api"

    def daemon(self, name: str) -> psutil.Process:
        process = Daemon(name, folder=self.root / "prefect").process()
        assert process is not None, f"{name} is not running"
        return process

    def flow_runs(self, flow: str) -> list[Any]:
        from prefect.client.orchestration import get_client
        from prefect.client.schemas.filters import FlowFilter, FlowFilterName
        from prefect.settings import PREFECT_API_URL, temporary_settings

        with temporary_settings({PREFECT_API_URL: self.url}), get_client(sync_client=True) as client:
            return client.read_flow_runs(flow_filter=FlowFilter(name=FlowFilterName(any_=[flow])))


def wait_for(ready: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not ready():
        assert time.monotonic() < deadline, f"{what}: not in {TIMEOUT_S:.0f} s"
        time.sleep(0.5)


def settings(root: Path, name: str, *more: str) -> list[str]:
    store = f"tracking.uri=sqlite:///{root}/mlflow.db"
    return [f"name={name}", f"output_dir={root}/runs", store, "cluster.num_workers=1", *more]


@contextlib.contextmanager
def deploy(root: Path, embedded_model: Path, deployments: dict[str, dict[str, Any]]) -> Iterator[Deployed]:
    """All deployments of prefect.yaml, changed as `deployments` (by name) says; ended with the block."""
    (root / "home" / "models").mkdir(parents=True)
    (root / "home" / "models" / embedded_model.name).symlink_to(embedded_model)
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    tree = yaml.safe_load(FILE.read_text())
    for deployment in tree["deployments"]:
        deployment |= deployments.get(deployment["name"], {})
    (root / "prefect.yaml").write_text(yaml.safe_dump(tree))
    unset = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT")}
    env = unset | {"PREFECT_HOME": str(root / "prefect"), "TLT_HOME": str(root / "home"), "OMP_NUM_THREADS": "1"}
    deployed = Deployed(root, port, env)
    try:
        deployed.up()
        yield deployed
    finally:
        assert "server" in deployed.tlt("deploy", "--stop")
        for name in ("server", "worker"):
            assert Daemon(name, folder=root / "prefect").process() is None


@contextlib.contextmanager
def webhook() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Its address, and the messages that it has received."""
    received: list[dict[str, Any]] = []

    class Hook(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

    with http.server.HTTPServer(("127.0.0.1", 0), Hook) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/hook", received
        server.shutdown()
