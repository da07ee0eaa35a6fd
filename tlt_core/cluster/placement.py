"""Where workers run: start Ray or join a cluster, reserve a place for each worker, say which node it got.

    cluster section -> require_room -> reserve -> Placement (bundles and nodes by rank)

`_WAIT_S` at most is waited for processors that something else uses.  What is impossible is a ClusterError before any
model is loaded.
"""

import logging
import math
import os
import secrets
import signal
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import ray
import torch
from ray._private import ray_constants
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from conf.system import ClusterConfig
from tlt_core.machine.disk import SHORT, socket_folder
from tlt_core.machine.huge_pages import tunables
from tlt_core.machine.processors import check_workers

log = logging.getLogger(__name__)

_WAIT_S = 30.0  # a run that has just ended frees its processors after a second or two
_CONNECT_S = 5.0
_STRATEGIES = {"pack": "PACK", "spread": "SPREAD"}
_PASSED_ON = ("GLOO_", "NCCL_")  # the driver's settings of the network between workers
_SOCKET_OF_RAY = "/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"  # its longest one


class RayNotStarted(RuntimeError):
    """Ray did not start here, though the configuration is right.  The text names the remedy."""


class ClusterError(ValueError):
    """The cluster cannot run the workers.  The text says what is asked, what there is, and the remedy."""


class Node(NamedTuple):
    id: str
    address: str


class Placement(NamedTuple):
    group: PlacementGroup
    bundles: tuple[int, ...]  # by rank
    nodes: tuple[Node, ...]  # by rank
    driver: Node

    @property
    def is_local(self) -> bool:
        return {node.id for node in self.nodes} == {self.driver.id}

    def worker(self, rank: int) -> PlacementGroupSchedulingStrategy:
        return PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self.bundles[rank])


def check_cluster(cluster: ClusterConfig, *, workers_per_engine: int = 1) -> None:
    """Is there room for the workers?  Joins a running cluster for a moment to see.  Raises ClusterError."""
    if cluster.address == "local":
        wanted, found = _gpus(cluster), torch.cuda.device_count()
        if wanted > found:
            share = round(1 / math.ceil(cluster.num_workers / found), 4) if found else 0
            raise ClusterError(
                f"cluster.num_workers={cluster.num_workers} with gpus_per_worker={cluster.gpus_per_worker:g} asks for "
                f"{_count(wanted, 'GPU')}, this machine has {found}; lower cluster.num_workers, set "
                f"cluster.gpus_per_worker={share:g}{' (workers then share a GPU)' if found else ''}, or give "
                "cluster.address of a Ray cluster that has as many"
            )
        return
    start_ray(cluster)
    try:
        require_room(cluster, workers_per_engine)
    finally:
        ray.shutdown()


def start_ray(cluster: ClusterConfig) -> None:
    """A Ray of our own on this machine, or the running cluster at `cluster.address`.

    Raises ClusterError, RayNotStarted, and TooManyWorkers for a machine that could not run them.
    """
    check_workers(cluster)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    environment = worker_environment(cluster)
    options: dict[str, Any] = {
        "log_to_driver": False,
        "logging_level": logging.WARNING,
        "runtime_env": {"env_vars": environment},
    }
    if cluster.address == "local":
        for name, value in environment.items():
            if name.startswith("RAY_"):  # for the raylet, which passes them on
                os.environ.setdefault(name, value)
        num_cpus = cluster.num_workers * cluster.threads_per_worker
        with _own_sigterm(), _loopback_only():
            _start_own(num_cpus=num_cpus, include_dashboard=False, _temp_dir=_folder_of_ray(), **options)
        _close_token_file()
        return
    try:
        _require_listener(cluster.address)
        with _own_sigterm():
            ray.init(address=cluster.address, **options)
    except (OSError, RuntimeError, ValueError, RayError) as error:
        raise ClusterError(
            f"cluster.address={cluster.address!r}: no Ray cluster answers from this machine ({error}).  Start one with "
            "'ray start --head' (further nodes: 'ray start --address=HOST:6379'), start the run on one of its nodes, "
            "with RAY_AUTH_MODE as the cluster has it; or set cluster.address=local"
        ) from error


def _folder_of_ray() -> str | None:
    """None: as Ray chooses it."""
    chosen = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR", SHORT)
    short = socket_folder(chosen, behind=_SOCKET_OF_RAY)
    return None if short == chosen else f"{short}/ray"


def _start_own(**options: Any) -> None:
    """Raises RayNotStarted when it takes longer than Ray allows itself, which is 30 s."""
    try:
        ray.init(address="local", **options)
    except Exception as error:  # Ray has no class of its own for it
        if "timed out during startup" not in str(error):
            raise
        ray.shutdown()
        raise RayNotStarted(
            "Ray did not start on this machine within 30 s: it is far too busy, or short of memory.  Start the "
            "same command again when it has room: it goes on from the newest checkpoint"
        ) from error


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Ray sets a handler of SIGTERM that exits in the middle of its own calls, which then abort the process."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _loopback_only() -> Iterator[None]:
    """Have Ray's processes listen to this machine alone, as Ray does on systems on which it forms no clusters."""
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def _close_token_file() -> None:
    """Ray lets everybody read the token with which its processes prove who they are."""
    token = Path.home() / ".ray" / "auth_token"
    if token.is_file() and token.stat().st_uid == os.getuid():
        token.chmod(0o600)


def _require_listener(address: str) -> None:
    """Raises OSError at once where Ray would try for over a minute."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()


def worker_environment(cluster: ClusterConfig, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables of every worker process, also on a cluster that somebody else has started."""
    threads = str(cluster.threads_per_worker)
    return {
        **{name: value for name, value in environment.items() if name.startswith(_PASSED_ON)},
        **tunables(environment),
        **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), threads),
        # Ray's default is niceness 15: any other process on the machine, even the driver, would starve the workers.
        "RAY_worker_niceness": "0",
        # Its raylet ends itself when its agents, which import for 10 s, are not there after 30 s: a busy machine.
        "RAY_agent_register_timeout_ms": "120000",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }


def require_room(cluster: ClusterConfig, workers_per_engine: int = 1) -> None:
    """Could the cluster hold the workers if nothing else ran on it?  Raises ClusterError."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    found = [_workers_that_fit(node["Resources"], cluster) for node in alive]
    fit = sum(found)
    if workers_per_engine > 1 and fit >= cluster.num_workers:
        whole = sum(number - number % workers_per_engine for number in found)
        if whole < cluster.num_workers:
            raise ClusterError(
                f"{_asked(cluster)}, {workers_per_engine} of them on one node (rollout.vllm.tensor_parallel); the "
                f"nodes have room for {found} workers.  Lower tensor_parallel, or use nodes with more GPUs"
            )
    if fit < cluster.num_workers:
        has = _amounts([node["Resources"] for node in alive])
        raise ClusterError(
            f"{_asked(cluster)}; the Ray cluster has {_count(len(alive), 'node')} with {has} in all, which is room for "
            f"{_count(fit, 'worker')}.  {_remedy(cluster)}"
        )


def reserve(cluster: ClusterConfig, workers_per_engine: int = 1) -> Placement:
    """A place for each worker.  Workers of a node have consecutive ranks; the driver's node comes first.  Workers that
    share an engine are on one node.

    Raises ClusterError when the processors stay taken.
    """
    bundle = {"CPU": float(cluster.threads_per_worker), "GPU": cluster.gpu_share}
    bundle = {name: amount * workers_per_engine for name, amount in bundle.items() if amount}
    count = cluster.num_workers // workers_per_engine
    group = placement_group([bundle] * count, strategy=_STRATEGIES[cluster.placement])
    if not group.wait(_WAIT_S):
        remove_placement_group(group)
        raise ClusterError(
            f"{_asked(cluster)}; the cluster is large enough, but only {_amounts([ray.available_resources()])} were "
            f"free within {_WAIT_S:.0f} s.  Wait until other jobs on it have ended ('ray status'), or: "
            f"{_remedy(cluster)}"
        )
    nodes = {node["NodeID"]: Node(node["NodeID"], node["NodeManagerAddress"]) for node in ray.nodes()}
    driver = nodes[ray.get_runtime_context().get_node_id()]
    node_of: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
    order = sorted(node_of, key=lambda b: (node_of[b] != driver.id, nodes[node_of[b]].address, node_of[b], b))
    bundles = tuple(b for b in order for _ in range(workers_per_engine))
    placement = Placement(group, bundles, tuple(nodes[node_of[b]] for b in bundles), driver)
    if not placement.is_local:
        places = "   ".join(f"{rank}: {n.address} ({n.id})" for rank, n in enumerate(placement.nodes))
        log.info("workers and their nodes  %s", places)
    return placement


def _workers_that_fit(resources: Mapping[str, float], cluster: ClusterConfig) -> int:
    by_cpus = int(resources.get("CPU", 0.0) // cluster.threads_per_worker)
    by_gpus = int(resources.get("GPU", 0.0)) * cluster.workers_per_gpu
    return min(by_cpus, by_gpus) if cluster.gpus_per_worker else by_cpus


def _gpus(cluster: ClusterConfig) -> int:
    """That hold all workers."""
    return math.ceil(cluster.num_workers / cluster.workers_per_gpu) if cluster.gpus_per_worker else 0


def _asked(cluster: ClusterConfig) -> str:
    workers, threads, gpus = cluster.num_workers, cluster.threads_per_worker, cluster.gpus_per_worker
    with_gpus = f" and {_count(_gpus(cluster), 'GPU')}" if gpus else ""
    return (
        f"cluster.num_workers={workers} with threads_per_worker={threads} and gpus_per_worker={gpus:g} asks for "
        f"{_count(workers * threads, 'CPU')}{with_gpus}"
    )


def _amounts(resources: Sequence[Mapping[str, float]]) -> str:
    cpus, gpus = (int(sum(r.get(name, 0.0) for r in resources)) for name in ("CPU", "GPU"))
    return f"{_count(cpus, 'CPU')} and {_count(gpus, 'GPU')}"


def _remedy(cluster: ClusterConfig) -> str:
    grow = "" if cluster.address == "local" else ", or add nodes ('ray start --address=HOST:6379' on each)"
    return f"Lower cluster.num_workers or cluster.threads_per_worker{grow}."


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def expected_files(folders: Sequence[Path]) -> dict[Path, int]:
    """The files of these folders, with their sizes."""
    return {path: path.stat().st_size for folder in folders for path in sorted(folder.iterdir()) if path.is_file()}


@contextmanager
def probe_file(folder: Path) -> Iterator[dict[Path, int]]:
    """A new file with an unpredictable name, removed at the end of the context."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f".seen-by-all-{secrets.token_hex(8)}"
    path.write_text(path.name)
    try:
        yield {path: len(path.name)}
    finally:
        path.unlink()


def require_seen(missing: Sequence[Sequence[Path]], placement: Placement) -> None:
    """missing: the driver's files that each worker does not see, by rank.  Raises ClusterError when there are any."""
    for rank, (paths, node) in enumerate(zip(missing, placement.nodes, strict=True)):
        if paths:
            raise ClusterError(
                f"worker {rank} on node {node.address} does not see {paths[0].parent} as the driver on "
                f"{placement.driver.address} does ({len(paths)} files, {paths[0].name} first): every node needs the "
                "same files at the same path.  Put output_dir, TLT_HOME and the model on storage that all nodes mount "
                "there, or set cluster.address=local"
            )
