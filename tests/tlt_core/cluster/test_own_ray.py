"""A Ray that a run starts for itself is for this machine and this user alone."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray

from conf.system import ClusterConfig
from tlt_core.cluster.placement import start_ray

pytestmark = pytest.mark.slow
STRANGER = """
import sys, ray
from ray._private import ray_constants
ray_constants.ENABLE_RAY_CLUSTER = False  # else it would take the loopback address for the network's
try:
    ray.init(address=sys.argv[1], log_to_driver=False)
except Exception as error:
    print("refused:", type(error).__name__, error)
else:
    print("let in", ray.get(ray.remote(lambda: 7).remote()))
"""


@pytest.fixture(scope="module")
def own_ray() -> Iterator[str]:
    """Its address."""
    before = signal.getsignal(signal.SIGTERM)
    start_ray(ClusterConfig(num_workers=1))
    assert signal.getsignal(signal.SIGTERM) is before, "Ray's own handler aborts the process"
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


def test_its_processes_listen_to_this_machine_alone(own_ray: str) -> None:
    ray.get(ray.remote(lambda: 7).remote())  # a worker process, too
    listening = {
        (process.name(), connection.laddr.ip)
        for process in (psutil.Process(), *psutil.Process().children(recursive=True))
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert {"gcs_server", "raylet"} <= {name for name, _ in listening}
    assert {address.removeprefix("::ffff:") for _, address in listening} == {"127.0.0.1"}


def test_its_token_is_read_by_nobody_else(own_ray: str) -> None:
    assert (Path.home() / ".ray" / "auth_token").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("token", ["right", "wrong"])
def test_who_has_another_token_is_not_let_in(own_ray: str, token: str) -> None:
    environment = {**os.environ, "RAY_AUTH_MODE": "token"}
    if token == "wrong":
        environment["RAY_AUTH_TOKEN"] = "0" * 64
    command = [sys.executable, "-c", STRANGER, own_ray]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    if token == "right":
        assert "let in 7" in said.stdout, said.stderr
    else:
        assert "let in" not in said.stdout
        assert "uthenticat" in said.stdout + said.stderr
