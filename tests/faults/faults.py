"""The faults: each is a context manager that strikes while the driver is held, and mends on its exit what it broke."""

import contextlib
import errno
import io
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from tests.faults.harness import Run, left
from tests.faults.service import Mlflow


class Place(NamedTuple):
    run: Run
    mlflow: Mlflow
    disk: Path  # folder on a disk of its own; holds the run's folder


Fault = Callable[[Place], AbstractContextManager[None]]


def driver_gets(number: int) -> Fault:
    @contextmanager
    def strike(place: Place) -> Iterator[None]:
        place.run.signal(number)
        yield

    return strike


@contextmanager
def driver_paused(place: Place) -> Iterator[None]:
    """The driver stands still for some seconds: it is held already."""
    time.sleep(5.0)
    yield


def killed(name: str) -> Fault:
    @contextmanager
    def strike(place: Place) -> Iterator[None]:
        _one(place, name).kill()
        yield

    return strike


def stopped(name: str) -> Fault:
    """SIGSTOP for one of the run's processes; SIGCONT in the end, if it is still there."""

    @contextmanager
    def strike(place: Place) -> Iterator[None]:
        process = _one(place, name)
        process.suspend()
        try:
            yield
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):  # the run may have ended it
                process.resume()

    return strike


def limited(name: str, kind: int, spare: int) -> Fault:
    """A resource limit of one of the run's processes, just above what it has now; "": of the driver."""

    @contextmanager
    def strike(place: Place) -> Iterator[None]:
        process = _one(place, name) if name else psutil.Process(place.run.pid)
        has = process.num_fds() if kind == resource.RLIMIT_NOFILE else process.memory_info().vms
        resource.prlimit(process.pid, kind, (has + spare, resource.prlimit(process.pid, kind)[1]))
        yield

    return strike


@contextmanager
def disk_full(place: Place) -> Iterator[None]:
    """Not a byte is free on the disk of the run's folder."""
    if not place.disk.is_mount():
        pytest.skip("this user may not mount a small disk")
    ballast = place.disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12):
            _fill(file, size)
    try:
        yield
    finally:
        ballast.unlink()


def _fill(file: io.FileIO, size: int) -> None:
    """Write until the disk is full; any other error is one of this test."""
    try:
        while file.write(bytes(size)):
            pass
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise


@contextmanager
def disk_read_only(place: Place) -> Iterator[None]:
    """The run's folder becomes read-only, as a disk with errors does: open files remain as they are."""
    folder = str(place.run.dir)
    mount("--bind", folder, folder)
    mount("-o", "remount,bind,ro", folder)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@contextmanager
def mlflow_killed(place: Place) -> Iterator[None]:
    """The tracking server is killed, and started again in the end."""
    place.mlflow.kill()
    try:
        yield
    finally:
        place.mlflow.start()


@contextmanager
def mlflow_silent(place: Place) -> Iterator[None]:
    """The tracking server accepts connections and does not answer."""
    place.mlflow.stop()
    try:
        yield
    finally:
        place.mlflow.go_on()


@contextmanager
def second_run(place: Place) -> Iterator[None]:
    """The same command once more, beside the first; it waits, and is told to stop."""
    log = place.run.log.with_suffix(".second")
    log.unlink(missing_ok=True)
    second = place.run.spawn(log)
    place.run.signal(signal.SIGCONT)
    try:
        until_s = time.monotonic() + 180
        while "is at work in" not in log.read_text():
            assert second.poll() is None, f"the second run did not wait: {log.read_text()[-2000:]}"
            assert time.monotonic() < until_s, log.read_text()[-2000:]
            time.sleep(0.1)
        children = psutil.Process(second.pid).children(recursive=True)
        time.sleep(2.0)
        second.send_signal(signal.SIGTERM)
        assert second.wait(60) == 143, log.read_text()[-2000:]
        assert not left(children, within_s=20)
        yield
    finally:
        second.kill()


def mount(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"this user may not mount: {done.stderr.strip()}")


def _one(place: Place, name: str) -> psutil.Process:
    until_s = time.monotonic() + 5
    while not (found := place.run.family(name)):
        assert time.monotonic() < until_s, f"the run has no process {name!r}"
        time.sleep(0.02)
    return found[0]


# ---------------------------------------------------------------------------------------------- between two starts


def newest_checkpoint(run: Run) -> Path:
    return max((run.dir / "checkpoints").glob("step_*"))


def torn(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flipped(path: Path) -> None:
    middle = path.stat().st_size // 2
    with path.open("r+b") as file:
        file.seek(middle)
        byte = file.read(1)[0]
        file.seek(middle)
        file.write(bytes([byte ^ 1]))


def half_a_line(path: Path) -> None:
    """What a power cut leaves of a file that was being appended to."""
    with path.open("a") as file:
        file.write('{"step": 99, "critic/rewa')


def damaged_line(path: Path) -> None:
    path.write_bytes(b"\0" * 20 + path.read_bytes())
