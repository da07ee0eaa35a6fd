"""A worker's heartbeat: every two seconds a thread says that the process runs, and how far it has got.

    worker's thread --beat--> dispatcher (`Signs`) <--signs, want_stacks-- driver (`watch`)
                  '-- on request: writes the stacks of all its threads to a file

A process that was stopped, or a machine that was lost, has no heartbeat.  A deadlocked worker still has one, but
reports no progress.
"""

import faulthandler
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError

from tlt_core.machine.getting_on import how_far

_EVERY_S = 2.0


class Sign(NamedTuple):
    """What is known of a worker."""

    pid: int
    silent_s: float  # since its last beat
    stuck_s: float  # since it got on


class Signs:
    """What the dispatcher knows of the workers' heartbeats."""

    def __init__(self) -> None:
        self._heard: dict[int, tuple[int, int, float]] = {}  # by rank: process, how far it has got, when it was heard
        self._got_on_s: dict[int, float] = {}
        self._requests = 0

    def beat(self, rank: int, pid: int, done: int) -> int:
        """A worker gives a sign of life; returns how often stacks were asked for so far.  done: see `getting_on`."""
        now_s, known = time.monotonic(), self._heard.get(rank)
        if known is None or known[1] != done:
            self._got_on_s[rank] = now_s
        self._heard[rank] = (pid, done, now_s)
        return self._requests

    def want_stacks(self) -> None:
        """Have every worker that has a heartbeat write its stacks."""
        self._requests += 1

    def signs(self) -> Mapping[int, Sign]:
        """By rank; a worker that was never heard is missing."""
        now_s = time.monotonic()
        return {
            rank: Sign(pid, now_s - heard_s, now_s - self._got_on_s[rank])
            for rank, (pid, _, heard_s) in self._heard.items()
        }


def begin_heartbeat(dispatcher: Any, rank: int, stacks: Path | None) -> None:
    """Its thread ends with the process, or with the dispatcher.  stacks: file for the stacks of this process."""

    def run() -> None:
        written = 0
        while True:
            try:
                wanted: int = ray.get(dispatcher.beat.remote(rank, os.getpid(), how_far()))
            except RayError:  # the group has ended
                return
            if wanted > written and stacks is not None:
                stacks.parent.mkdir(parents=True, exist_ok=True)
                with stacks.open("w") as file:
                    faulthandler.dump_traceback(file, all_threads=True)
            written = wanted
            time.sleep(_EVERY_S)

    threading.Thread(target=run, name="heartbeat", daemon=True).start()
