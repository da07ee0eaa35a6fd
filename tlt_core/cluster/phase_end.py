"""The end of a phase, told to workers in the middle of a piece of training: a key in the store of their group.

    the first worker that is told to stop --announce--> store <--reached-- others, between two layers

The dispatcher is asked between pieces only; a look into the store takes 20 us.  Nobody depends on it: where the store
is lost, with the worker that hosts it, pieces are finished as they are.
"""

import logging
import time
from datetime import timedelta

import torch.distributed as dist

log = logging.getLogger(__name__)

_TIMEOUT = timedelta(seconds=5)
_EVERY_S = 0.01  # between two looks


class PhaseEnd:
    """One a worker; all of them `begin` the same phases in the same order."""

    def __init__(self, store: dist.Store | None) -> None:
        """store: None where there is nobody to tell."""
        self._store, self._phase, self._looked_s, self._reached = store, 0, 0.0, False

    @classmethod
    def at(cls, meeting_point: str, *, world_size: int) -> "PhaseEnd":
        """By a connection of its own to the store that listens there."""
        if world_size == 1:
            return cls(None)
        host, _, port = meeting_point.rpartition(":")
        return cls(dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=_TIMEOUT))

    def begin(self) -> None:
        """The next phase."""
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
        """Has somebody announced it?  Looks every 10 ms at most."""
        if self._store is None or self._reached or time.monotonic() - self._looked_s < _EVERY_S:
            return self._reached
        try:
            self._reached = self._store.check([self._key])
        except RuntimeError as error:
            self._lose(error)
        self._looked_s = time.monotonic()
        return self._reached

    @property
    def _key(self) -> str:
        return f"phase-{self._phase}-is-over"

    def _lose(self, error: RuntimeError) -> None:
        log.warning("the store of the worker group is lost: training ends with its pieces from now on (%s)", error)
        self._store = None
