"""Files written in the background, while training and rollout go on.

    caller --submit(target, write)--> jobs, one a target --thread--> partial file, fsync, rename, fsync of the folder

consumes: write functions over snapshots that nobody changes any more.  waits: only in `wait` and `close`.  produces:
whole files; a kill at any moment leaves the previous one.

A newer job replaces a waiting one for the same target, so at most one snapshot of a target waits in memory.  Jobs run
in the order of submission: a file that names others is submitted after them.
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from tlt_core.items.store import write_atomically


class WriteJob:
    """One file on its way.  Ends when it is written, has failed, or was replaced by a newer job."""

    def __init__(self, target: Path, write: Callable[[Path], object]) -> None:
        self.target = target
        self.error: Exception | None = None
        self._write = write
        self._ended = threading.Event()

    @property
    def done(self) -> bool:
        """Ended; look at `error` for how."""
        return self._ended.is_set()

    def wait(self) -> None:
        """Until it has ended.  Does not raise what went wrong, see `error`."""
        self._ended.wait()


class BackgroundWriter:
    """One thread.  A target belongs to one writer.  `close` it; jobs that wait when the process ends are lost."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queued: OrderedDict[Path, WriteJob] = OrderedDict()
        self._running: WriteJob | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="background-writer", daemon=True)
        self._thread.start()

    def submit(self, target: Path, write: Callable[[Path], object]) -> WriteJob:
        """Have `write(temporary path)` called in the background, then put its file in the place of `target`.

        What goes wrong is the job's `error`.
        """
        job = WriteJob(target, write)
        with self._changed:
            assert not self._closed, "the writer was closed"
            replaced = self._queued.pop(target, None)
            self._queued[target] = job
            self._changed.notify_all()
        if replaced is not None:
            replaced._ended.set()
        return job

    def wait(self) -> None:
        """Until everything submitted has ended."""
        with self._changed:
            self._changed.wait_for(lambda: not self._queued and self._running is None)

    def close(self) -> None:
        """Write what is queued and end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            try:
                _write_durably(job.target, job._write)
            except Exception as error:  # kept for the caller, who reports it; the thread writes what comes next
                job.error = error
            job._write = _forget  # frees the snapshot
            with self._changed:
                self._running = None
                self._changed.notify_all()
            job._ended.set()

    def _next(self) -> WriteJob | None:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._queued) or self._closed)
            if not self._queued:
                return None
            _, self._running = self._queued.popitem(last=False)
            return self._running


def _write_durably(target: Path, write: Callable[[Path], object]) -> None:
    for stale in target.parent.glob(f".{target.name}.partial-*"):  # left by a killed process
        stale.unlink(missing_ok=True)
    write_atomically(target, write)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _forget(path: Path) -> None:
    raise AssertionError(f"{path} was written already")
