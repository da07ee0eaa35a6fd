"""Checkpoints that survive a kill at any moment and show later damage.

A checkpoint is a folder `step_000012/` with `state.json` (driver), the workers' files, and `COMPLETE`, written last,
which lists size and SHA-256 of every file.  The folder is built under a temporary name and renamed when it is whole.
A run may write and prune while another process (`tlt evaluate`, `tlt export`) reads.  Readers hold a shared lock on
`COMPLETE`, and `prune` removes only what it can lock alone.  The kernel frees the lock of a process that is killed.
"""

import errno
import fcntl
import functools
import json
import logging
import math
import shutil
from collections.abc import Callable, Container, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tlt_core.items.store import flush, make_folder, put_in_place, sha256_of

log = logging.getLogger(__name__)

_COMPLETE, _STATE = "COMPLETE", "state.json"
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)  # of a disk without locks, where nothing is protected


class CheckpointError(ValueError):
    """A checkpoint that cannot be used.  The text names it and the remedy."""


@dataclass(frozen=True, slots=True)
class DriverState:
    """What the driver needs to go on.  All sampling noise is keyed by step, so there is no generator state."""

    step: int  # completed steps
    data_cursor: int  # prompts consumed
    policy_version: int
    tracker_run_id: str
    resume_attempt: int
    fingerprint: str  # of the parts of the configuration that may not change between attempts
    best_metric: float | None  # value that ranks this checkpoint
    precision: dict[str, str] = field(default_factory=dict)  # see `machine/precision`; empty in older states
    engine: str = ""  # that samples: own or vllm; empty in older states
    drafter_version: int = 0  # publishes so far
    drafter_policy_version: int = 0  # of the newest responses that the drafter in use was trained on
    metrics: dict[str, float] = field(default_factory=dict)  # the step's, should the attempt end before logging them
    num_steps: int = 0  # that the run was to have; 0 in older states


class Found(NamedTuple):
    folder: Path
    state: DriverState


def save(root: Path, state: DriverState, write_parts: Callable[[Path], None]) -> Path:
    """Write one checkpoint: `write_parts` fills a temporary folder with the workers' parts.  Returns the final folder.

    When that fails (a full disk, a dead worker) nothing is left behind and older checkpoints are untouched.
    """
    final = root / f"step_{state.step:06d}"
    partial = root / f".partial-{final.name}"
    shutil.rmtree(partial, ignore_errors=True)
    make_folder(root)
    partial.mkdir()
    try:
        write_parts(partial)
        (partial / _STATE).write_text(json.dumps(asdict(state), indent=1))
        paths = sorted(path for path in partial.rglob("*") if path.is_file())
        with ThreadPoolExecutor() as pool:  # the workers wait, so their cores are free
            listed = list(pool.map(_written, paths))
        for folder in (path for path in partial.rglob("*") if path.is_dir()):
            flush(folder)
        files = {str(path.relative_to(partial)): entry for path, entry in zip(paths, listed, strict=True)}
        (partial / _COMPLETE).write_text(json.dumps({"files": files}))
        flush(partial / _COMPLETE)
        flush(partial)
        put_in_place(partial, final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return final


def load_state(folder: Path) -> DriverState:
    """The driver's part.  Raises CheckpointError."""
    try:
        values = dict(json.loads((folder / _STATE).read_text()))
        values.pop("payoff", None)  # of older states
        return DriverState(**values)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"checkpoint {folder} cannot be read ({error}); remove it to resume from an older one"
        ) from None


def names(root: Path) -> list[str]:
    """Names of the whole checkpoints, oldest first, whether or not they are valid."""
    return sorted(path.name for path in root.glob("step_*"))


@contextmanager
def newest(root: Path) -> Iterator[Found | None]:
    """The newest checkpoint whose files are all as they were written; `prune` leaves it alone within the block.

    Others are skipped with a warning.  None: there is no valid one.  Raises CheckpointError.
    """
    skipped: set[Path] = set()
    while folders := set(root.glob("step_*")) - skipped:  # looked up again: a run may have written and pruned meanwhile
        folder = max(folders)
        with _locked(folder / _COMPLETE, exclusively=False) as why_not:
            problem = why_not or _damage(folder)
            if problem is None:
                yield Found(folder, load_state(folder))
                return
        skipped.add(folder)
        _say_skipped(folder, problem)
    yield None


@functools.cache
def _say_skipped(folder: Path, problem: str) -> None:
    """Once a process, however many look for the newest one."""
    log.warning("skipping checkpoint %s: %s", folder, problem)


def newest_valid(root: Path) -> Path | None:
    """Folder of `newest`, which may be pruned as soon as it is known."""
    with newest(root) as found:
        return None if found is None else found.folder


def prune(root: Path, *, keep_last: int, keep_best: int) -> None:
    """Remove all valid checkpoints but the newest `keep_last` and the `keep_best` with the highest metric.

    What another process uses is left for the next call.  Of the files other than `state.json` only the sizes are
    compared, so pruning does not read them.
    """
    folders = sorted(p for p in root.glob("step_*") if _damage(p, digests_of=(_STATE,)) is None)
    metrics = {p: load_state(p).best_metric for p in folders}
    ranked = sorted((m, p) for p, m in metrics.items() if m is not None and math.isfinite(m))
    best = [p for _, p in reversed(ranked)][:keep_best]
    for folder in set(folders) - {*folders[-keep_last:], *best}:
        with _locked(folder / _COMPLETE, exclusively=True) as why_not:
            if why_not is None:
                shutil.rmtree(folder)
            else:
                log.info("checkpoint %s is kept for now: %s", folder, why_not)


@contextmanager
def _locked(file: Path, *, exclusively: bool) -> Iterator[str | None]:
    """Hold the file's lock within the block.  Yields why it is not held, None where it is."""
    why_not = None
    with ExitStack() as stack:
        try:  # network disks lock exclusively only what is open for writing
            opened = stack.enter_context(file.open("r+b" if exclusively else "rb"))
            fcntl.flock(opened, (fcntl.LOCK_EX if exclusively else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            why_not = "another process is using it" if exclusively else "another process is removing it"
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                why_not = f"{file.name} cannot be locked ({error})"
        yield why_not


def _damage(folder: Path, *, digests_of: Container[str] | None = None) -> str | None:
    """What is wrong with a checkpoint.  digests_of: the files to be read and compared; None: all of them."""
    try:
        files = json.loads((folder / _COMPLETE).read_text())["files"]
        expected = {name: (entry["bytes"], entry["sha256"]) for name, entry in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"it has no valid {_COMPLETE} marker"
    if _STATE not in expected:
        return f"its {_COMPLETE} marker does not list {_STATE}"
    for name, (size, digest) in expected.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            return f"{name} is missing or truncated"
        if (digests_of is None or name in digests_of) and _digest(path, path.stat().st_mtime_ns) != digest:
            return f"{name} has changed since it was written (its SHA-256 differs)"
    return None


@functools.lru_cache(maxsize=64)
def _digest(path: Path, mtime_ns: int) -> str:
    """A process that asks twice reads a file once; `mtime_ns` makes it read a file again that was written since."""
    return sha256_of(path)


def _written(path: Path) -> dict[str, Any]:
    """Flush a file to the disk; returns its entry in `COMPLETE`."""
    flush(path)
    return {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
