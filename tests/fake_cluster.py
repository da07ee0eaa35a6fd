"""Ray's own fake cluster: nodes are processes of this machine, each with an address of its own on the loopback.

The addresses begin at 127.0.0.2, because Ray takes 127.0.0.1 for "this machine" and looks for its outer address.  The
nodes' working directory is not the project's, and they get none of the settings with which we start a Ray of our own.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

_OBJECT_STORE_BYTES = 80 << 20
_TIMEOUT_S = 90


def add_node(cluster: Cluster, address: str, *, num_cpus: int, num_gpus: int = 0) -> object:
    head = {"include_dashboard": False} if cluster.head_node is None else {}
    with contextlib.chdir(tempfile.gettempdir()):
        return cluster.add_node(
            node_ip_address=address,
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            object_store_memory=_OBJECT_STORE_BYTES,
            **head,
        )


@contextlib.contextmanager
def fake_cluster(cpus: Mapping[str, int], *, gpus: int = 0) -> Iterator[Cluster]:
    """cpus: of each node, by its address; the first is the head, where drivers run.  gpus: of each node; there are none
    behind these numbers.  Ends every process it started."""
    before = _ray_processes()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_USAGE_STATS_ENABLED", "0")
        for name in ("RAY_worker_niceness", "RAY_ADDRESS"):
            environment.delenv(name, raising=False)
        cluster = Cluster()
        try:
            for address, count in cpus.items():
                add_node(cluster, address, num_cpus=count, num_gpus=gpus)
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()
            _, left = psutil.wait_procs(_ray_processes() - before, timeout=30)
            for process in left:
                process.kill()
            assert not left, f"Ray left processes behind: {left}"


@contextlib.contextmanager
def node_with_own_disk(cluster: Cluster, address: str, hidden: Path, *, num_cpus: int) -> Iterator[None]:
    """A node on which the folder `hidden` is another, empty one, as on a machine that does not mount it."""
    ray_command = [str(Path(sys.executable).with_name("ray")), "start", "--block", f"--address={cluster.address}"]
    node = [f"--node-ip-address={address}", f"--num-cpus={num_cpus}", f"--object-store-memory={_OBJECT_STORE_BYTES}"]
    mount = f"mount -t tmpfs none {hidden} && exec "
    script = mount + " ".join([*ray_command, *node])
    before = len(_alive(cluster))
    process = subprocess.Popen(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_until(lambda: len(_alive(cluster)) == before + 1)
        yield
    finally:
        process.terminate()
        process.wait(30)
        _wait_until(lambda: len(_alive(cluster)) == before)


def own_disks_are_possible() -> bool:
    """May this user give a process a view of the file system of its own?"""
    try:
        command = ["unshare", "--user", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def _alive(cluster: Cluster) -> list[dict]:
    return [node for node in cluster.global_state.node_table() if node["Alive"]]


def _wait_until(done) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    while not done():
        assert time.monotonic() < deadline, "the node did not come, or did not go"
        time.sleep(0.2)


def _ray_processes() -> set[psutil.Process]:
    """Descendants of this process that belong to Ray."""
    found = set()
    for child in psutil.Process(os.getpid()).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if "ray" in child.name() or any("/ray/" in word for word in child.cmdline()):
                found.add(child)
    return found
