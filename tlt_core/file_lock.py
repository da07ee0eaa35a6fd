"""A lock that a dead process cannot hold: the kernel frees it with the process, however that ends.

POSIX record locks, not flock: those would live on in forked children (scoring processes) of a killed run.
"""

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger(__name__)


class Locked(ValueError):
    """Another process holds the lock.  The text says which."""


@contextmanager
def exclusive(path: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold the lock for the block, which only one process at a time enters.

    When another process is inside: wait for it to leave or die, or raise Locked at once.  The file stays behind; it is
    the kernel's lock on it that counts.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # BlockingIOError or PermissionError, by platform
            holder = os.pread(handle, 64, 0).decode(errors="replace").strip() or "?"
            if not wait:
                raise Locked(f"process {holder} is at work in {path.parent}; wait for it, or end it") from None
            log.warning("process %s is at work in %s; waiting for it", holder, path.parent)
            fcntl.lockf(handle, fcntl.LOCK_EX)
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(handle)
