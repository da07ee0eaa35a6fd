"""The driver's watch over its workers while it waits for them, and the post-mortem of a call that failed.

    silent    a worker has no heartbeat: its process was stopped, its machine is lost or far too busy
    stuck     all awaited workers are alive, and none makes progress
    no Ray    a server of the driver's own Ray has ended: the run is given up at once

The first two are logged once, with worker and phase, and the workers' stacks are written.  After `cluster.silence_s` or
`cluster.stuck_s` the run is given up, so that it can be started again from the newest checkpoint.

Without its control server (GCS) a Ray goes on for a minute and then kills the driver silently; its agents stay for
longer.  Without its raylet the workers end, and Ray takes half a minute to say so.  So the driver looks by itself.
"""

import contextlib
import faulthandler
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import RayError, RayTaskError

from conf.system import ClusterConfig
from tlt_core.cluster.heartbeat import Sign
from tlt_core.cluster.placement import Node, Placement
from tlt_core.machine.getting_on import STACKS_WANTED

log = logging.getLogger(__name__)

_EVERY_S = 2.0  # between two looks
_SILENCE_SAID_S, _STUCK_SAID_S = 30.0, 300.0  # before it is logged; at half the limit if that is earlier
_SERVERS = ("gcs_server", "raylet")  # of Ray
_NOTICED_S = 10.0  # for Ray to notice that a process or node is gone, after its peers have felt it


class Watch:
    """Used by `WorkerGroup`.  `begin` names what is waited for; `look` is called while waiting."""

    def __init__(
        self, cluster: ClusterConfig, placement: Placement, ask: Callable[[str], Any], *, shared: Path | None
    ) -> None:
        """ask: calls a method of the dispatcher.  shared: folder for the workers' stacks."""
        self._cluster, self._placement, self._ask = cluster, placement, ask
        # Where the driver has joined a running cluster there are none.
        self._servers = {child: name for child in psutil.Process().children() if (name := _name(child)) in _SERVERS}
        self._stacks = None if shared is None else shared.resolve() / STACKS_WANTED.parent
        self._what, self._began_s, self._looked_s = "", 0.0, 0.0
        self._silent: set[int] = set()  # logged
        self._last: Mapping[int, Sign] = {}
        self._said_stuck = False

    def begin_heartbeats(self, workers: Sequence[Any], dispatcher: Any) -> None:
        """Have the workers give signs of life.  workers, dispatcher: handles of the Ray actors."""
        for rank, worker in enumerate(workers):
            worker.begin_heartbeat.remote(dispatcher, self._stacks and self._stacks / f"worker-{rank}.txt")

    def begin(self, what: str) -> None:
        self._what, self._began_s, self._said_stuck = what, time.monotonic(), False

    def look(self, ranks: Collection[int], *, may_idle: bool = False) -> str | None:
        """Look after the workers that are waited for, now and then.  Returns why the run must be given up, if it must.

        may_idle: they wait for something else, so they need not make progress.
        """
        now_s = time.monotonic()
        if not ranks or now_s - self._looked_s < _EVERY_S:
            return None
        self._looked_s = now_s
        if lost := self.lost_ray():
            return lost
        self._write_requested()
        waited_s, signs = now_s - self._began_s, self._ask("signs")
        return self._silence(ranks, signs, waited_s) or (None if may_idle else self._standstill(ranks, signs, waited_s))

    def lost_ray(self) -> str:
        """Why the run must be given up when a server of the driver's own Ray has ended; ends the rest of Ray then."""
        gone = [name for server, name in self._servers.items() if not _is_there(server)]
        if not gone:
            return ""
        for process in psutil.Process().children(recursive=True):  # they do not end by themselves, or late
            if (name := _name(process)) in _SERVERS or name.startswith("ray::"):  # Ray renames its Python processes
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        lost = " and ".join(f"Ray's process {name} on this machine" for name in gone)
        return f"{lost} has ended: it was killed, or memory was short"

    def kill_silent(self) -> None:
        """End the processes of silent workers of this machine: a stopped process does not hear Ray."""
        for rank in self._silent:
            sign = self._last.get(rank)
            if sign is not None and self._is_here(rank):
                with contextlib.suppress(psutil.NoSuchProcess):
                    psutil.Process(sign.pid).kill()

    def _silence(self, ranks: Collection[int], signs: Mapping[int, Sign], waited_s: float) -> str | None:
        self._last = signs
        limit_s = self._cluster.silence_s
        silent_s = {rank: signs[rank].silent_s if rank in signs else waited_s for rank in ranks}
        for rank in [r for r in self._silent if silent_s.get(r, limit_s) < _EVERY_S * 2]:
            log.warning("worker %d answers again", rank)
            self._silent.discard(rank)
        for rank, quiet_s in silent_s.items():
            if quiet_s > min(_SILENCE_SAID_S, limit_s / 2) and rank not in self._silent:
                self._silent.add(rank)
                log.warning(
                    "%s, %s, has given no sign of life for %.0f s in the phase %r; the run ends after "
                    "cluster.silence_s=%.0f s of silence",
                    self._name(rank),
                    self._state(rank, signs),
                    quiet_s,
                    self._what,
                    limit_s,
                )
                self._write_stacks()
        lost = [rank for rank, quiet_s in silent_s.items() if quiet_s > limit_s]
        if not lost:
            return None
        names = "; ".join(f"{self._name(rank)}, {self._state(rank, signs)}" for rank in lost)
        return (
            f"No sign of life for cluster.silence_s={limit_s:.0f} s in the phase {self._what!r} from {names}.  "
            "Look at its machine (stopped process, memory, network)"
        )

    def _standstill(self, ranks: Collection[int], signs: Mapping[int, Sign], waited_s: float) -> str | None:
        limit_s = self._cluster.stuck_s
        known_s = [signs[rank].stuck_s for rank in ranks if rank in signs]
        stuck_s = min([waited_s, *known_s])
        if stuck_s > min(_STUCK_SAID_S, limit_s / 2) and not self._said_stuck:
            self._said_stuck = True
            log.warning(
                "no worker has got on for %.0f s in the phase %r; the run ends after cluster.stuck_s=%.0f s.  Stacks%s",
                stuck_s,
                self._what,
                limit_s,
                self._write_stacks(),
            )
        if stuck_s <= limit_s:
            return None
        where = f" Their stacks are in {self._stacks}." if self._stacks is not None else ""
        return (
            f"No worker has got on for cluster.stuck_s={limit_s:.0f} s in the phase {self._what!r}, for which workers "
            f"{sorted(ranks)} are waited for.{where} Raise cluster.stuck_s if one pass really takes that long"
        )

    def _write_requested(self) -> None:
        if self._stacks is None or not (self._stacks / STACKS_WANTED.name).exists():
            return
        (self._stacks / STACKS_WANTED.name).unlink(missing_ok=True)
        with (self._stacks / "driver.txt").open("w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        log.info("as asked: the stacks of the driver and%s", self._write_stacks())

    def _write_stacks(self) -> str:
        """Have all workers write their stacks; says where."""
        if self._stacks is None:
            return " are not written, since there is no folder for them"
        self._ask("want_stacks")
        return f" of all workers are in {self._stacks}"

    def _name(self, rank: int) -> str:
        return f"worker {rank} on node {self._placement.nodes[rank].address}"

    def _state(self, rank: int, signs: Mapping[int, Sign]) -> str:
        if rank not in signs:
            return "which was never heard"
        pid = signs[rank].pid
        if not self._is_here(rank):
            return f"process {pid}"
        try:
            return f"process {pid} ({psutil.Process(pid).status()})"
        except psutil.NoSuchProcess:
            return f"process {pid} (gone)"

    def _is_here(self, rank: int) -> bool:
        return self._placement.nodes[rank].id == self._placement.driver.id


def dead_processes(workers: Sequence[Any], nodes: Sequence[Node], dispatcher: Any) -> list[str]:
    """In words; nodes: of the workers, by rank.  A living process answers, or is busy."""
    asked = {actor.__ray_ready__.remote(): number for number, actor in enumerate([*workers, dispatcher])}
    pending, dead, until_s = list(asked), list[int](), time.monotonic() + _NOTICED_S
    while pending and not dead and (left_s := until_s - time.monotonic()) > 0:
        answered, pending = ray.wait(pending, num_returns=1, timeout=left_s)
        dead = [asked[call] for call in answered if _is_lost(call)]
    lost = {node.id for node in nodes} - {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    found = [
        f"worker {rank} on node {node.address}{', which has left the cluster' if node.id in lost else ''}"
        for rank, node in enumerate(nodes)
        if rank in dead or node.id in lost
    ]
    return [*found, *(["the dispatcher of requests"] if len(workers) in dead else [])]


def own_error(error: RayError) -> Exception | None:
    """Our own typed errors keep their type across the process boundary; anything else is a dead worker."""
    cause = error.cause if isinstance(error, RayTaskError) else None
    return cause if isinstance(cause, OSError) or type(cause).__module__.startswith("tlt_core.") else None


def _is_lost(call: Any) -> bool:
    try:
        ray.get(call)
    except RayError:
        return True
    return False


def _name(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.name()
    return ""


def _is_there(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False
