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


class Beat(NamedTuple):
    """What a worker says of itself."""

    rank: int
    pid: int
    done: int  # see `machine/getting_on`


class Sign(NamedTuple):
    """What is known of a worker."""

    pid: int
    silent_s: float  # since its last beat
    stuck_s: float  # since it got on


class Signs:
    """The newest beat of each worker.  The dispatcher holds it."""

    def __init__(self) -> None:
        self._heard: dict[int, tuple[Beat, float]] = {}
        self._got_on_s: dict[int, float] = {}
        self._requests = 0

    def heard(self, beat: Beat) -> int:
        """Note a beat; returns how often stacks were asked for so far."""
        now_s, known = time.monotonic(), self._heard.get(beat.rank)
        if known is None or known[0].done != beat.done:
            self._got_on_s[beat.rank] = now_s
        self._heard[beat.rank] = (beat, now_s)
        return self._requests

    def want_stacks(self) -> None:
        """Have every worker that has a heartbeat write its stacks."""
        self._requests += 1

    def all(self) -> Mapping[int, Sign]:
        """By rank; a worker that was never heard is missing."""
        now_s = time.monotonic()
        return {
            rank: Sign(beat.pid, now_s - heard_s, now_s - self._got_on_s[rank])
            for rank, (beat, heard_s) in self._heard.items()
        }


class Heartbeat:
    """One per worker; its thread ends with the process, or with the dispatcher."""

    def __init__(self, dispatcher: Any, rank: int, *, stacks: Path | None) -> None:
        """stacks: file for the stacks of this process; None: they are not written."""
        self._dispatcher, self._rank, self._stacks = dispatcher, rank, stacks
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def _run(self) -> None:
        written = 0
        while True:
            beat = Beat(self._rank, os.getpid(), how_far())
            try:
                wanted: int = ray.get(self._dispatcher.beat.remote(beat))
            except RayError:  # the group has ended
                return
            if wanted > written and self._stacks is not None:
                self._stacks.parent.mkdir(parents=True, exist_ok=True)
                with self._stacks.open("w") as file:
                    faulthandler.dump_traceback(file, all_threads=True)
            written = wanted
            time.sleep(_EVERY_S)
