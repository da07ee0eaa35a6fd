"""The driver's watch over its workers while it waits for them.

    silent    a worker has no heartbeat: its process was stopped, its machine is lost or far too busy
    stuck     all awaited workers are alive, and none makes progress
    no Ray    a server of the driver's own Ray has ended: the run is given up at once

The first two are logged once, with worker and phase, and the workers' stacks are written.  After `cluster.silence_s` or
`cluster.stuck_s` the run is given up, so that it can be started again from the newest checkpoint.
"""

import contextlib
import faulthandler
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from conf.system import ClusterConfig
from tlt_core.cluster.heartbeat import Sign
from tlt_core.cluster.own_ray import OwnRay
from tlt_core.cluster.placement import Placement
from tlt_core.machine.getting_on import STACKS_WANTED

log = logging.getLogger(__name__)

_EVERY_S = 2.0  # between two looks
_SILENCE_SAID_S, _STUCK_SAID_S = 30.0, 300.0  # before it is logged; at half the limit if that is earlier


class Watch:
    """Used by `WorkerGroup`.  `begin` names what is waited for; `look` is called while waiting."""

    def __init__(
        self, cluster: ClusterConfig, placement: Placement, ask: Callable[[str], Any], *, shared: Path | None
    ) -> None:
        """ask: calls a method of the dispatcher.  shared: folder for the workers' stacks."""
        self._cluster, self._placement, self._ask = cluster, placement, ask
        self._ray = OwnRay()
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
        """The driver begins to wait for `what`."""
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
        lost = self._ray.lost()
        if lost:
            self._ray.kill()
        return lost and f"{lost} has ended: it was killed, or memory was short"

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
        """Write the stacks that somebody has asked for, the driver's own included."""
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
