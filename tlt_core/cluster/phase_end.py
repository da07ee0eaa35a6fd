"""Tells workers in the middle of a piece of training that the phase has ended: a key in the store of their group.

    the first worker that is told to stop --announce--> store <--reached-- others, between two layers

A worker asks the dispatcher only between two pieces, and a piece takes up to `micro_step_s`.  The store can be asked
within a piece, so pre-emption takes milliseconds (`bubble/preempt_ms_p95`).  If the store is lost, with the worker that
hosts it, pieces are finished as usual.
"""

import logging
import time
from datetime import timedelta

import torch.distributed as dist

log = logging.getLogger(__name__)

_TIMEOUT = timedelta(seconds=5)
_EVERY_S = 0.01  # between two questions to the store


class PhaseEnd:
    """One per worker.  All workers `begin` the same phases in the same order."""

    def __init__(self, store: dist.Store | None) -> None:
        """store: None for a lone worker."""
        self._store, self._phase, self._asked_s, self._reached = store, 0, 0.0, False

    @classmethod
    def at(cls, meeting_point: str, *, world_size: int) -> "PhaseEnd":
        """With a connection of its own to the group's store."""
        if world_size == 1:
            return cls(None)
        host, _, port = meeting_point.rpartition(":")
        return cls(dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=_TIMEOUT))

    def begin(self) -> None:
        """The next phase begins."""
        self._phase += 1
        self._reached = False

    def announce(self) -> None:
        """This phase has ended everywhere."""
        if self._store is None:
            return
        try:
            self._store.set(self._key, "1")
        except RuntimeError as error:
            self._lose(error)

    def reached(self) -> bool:
        """Has a worker announced the end?  Asks the store every 10 ms at most."""
        if self._store is None or self._reached or time.monotonic() - self._asked_s < _EVERY_S:
            return self._reached
        try:
            self._reached = self._store.check([self._key])
        except RuntimeError as error:
            self._lose(error)
        self._asked_s = time.monotonic()
        return self._reached

    @property
    def _key(self) -> str:
        return f"phase-{self._phase}-is-over"

    def _lose(self, error: RuntimeError) -> None:
        log.warning("the store of the worker group is lost: pieces of training are no longer cut short (%s)", error)
        self._store = None
