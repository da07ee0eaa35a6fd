"""A lock between processes.  The kernel frees it when its holder ends, also after `kill -9`."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

log = logging.getLogger(__name__)


class Locked(ValueError):
    """Another process holds the lock.  The text says which."""


@contextmanager
def exclusive(path: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold the lock for the block, which only one process at a time enters.  The file remains.  wait: until the holder
    leaves or dies; else Locked is raised at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path, fallback_to_soft=False)  # a soft lock would outlive a killed holder
    try:
        lock.acquire(blocking=False)
    except Timeout:
        holder = path.read_text(errors="replace").strip() or "?"
        if not wait:
            raise Locked(f"process {holder} is at work in {path.parent}; wait for it, or end it") from None
        log.warning("process %s is at work in %s; waiting for it", holder, path.parent)
        lock.acquire()
    try:
        path.write_text(f"{os.getpid()}\n")
        yield
    finally:
        lock.release()
