"""Checkpoints that a kill at any moment cannot spoil.

A checkpoint is a folder `step_000012/` with `state.json` (driver), one `rank_N` part per worker that has something
to say, and `COMPLETE`, written last.  It is built under a temporary name and renamed when whole, so a folder of the
final name is complete or was damaged later; `newest_valid` skips damaged ones and says so.
"""

import json
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tlt_core.store import sha256_of

log = logging.getLogger(__name__)

_COMPLETE = "COMPLETE"


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
    drafter_version: int = 0  # publishes so far
    drafter_policy_version: int = 0  # whose responses the drafter in use has learnt from last
    payoff: dict[str, Any] = field(default_factory=dict)  # of drafter training, see `spot/payoff`
    metrics: dict[str, float] = field(
        default_factory=dict
    )  # the step's, for an attempt that ended before it wrote them down


def save(root: Path, state: DriverState, write_parts: Callable[[Path], None]) -> Path:
    """Write one checkpoint: `write_parts` fills a temporary folder with the workers' parts.  Returns the final folder.

    When that fails (a full disk, a dead worker) nothing is left behind and older checkpoints are untouched.
    """
    final = root / f"step_{state.step:06d}"
    partial = root / f".partial-{final.name}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        write_parts(partial)
        (partial / "state.json").write_text(json.dumps(asdict(state), indent=1))
        digests = {str(p.relative_to(partial)): p.stat().st_size for p in sorted(partial.rglob("*")) if p.is_file()}
        (partial / _COMPLETE).write_text(json.dumps({"bytes": digests, "state": sha256_of(partial / "state.json")}))
        _sync_tree(partial)
        if final.exists():
            shutil.rmtree(final)
        partial.rename(final)
        _sync_folder(root)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return final


def load_state(folder: Path) -> DriverState:
    """The driver's part.  Raises CheckpointError."""
    try:
        return DriverState(**json.loads((folder / "state.json").read_text()))
    except (OSError, json.JSONDecodeError, TypeError) as error:
        raise CheckpointError(
            f"checkpoint {folder} cannot be read ({error}); remove it to resume from an older one"
        ) from None


def newest_valid(root: Path) -> Path | None:
    """The newest complete checkpoint; damaged ones are skipped with a warning."""
    for folder in sorted(root.glob("step_*"), reverse=True):
        problem = _damage(folder)
        if problem is None:
            return folder
        log.warning("skipping checkpoint %s: %s", folder, problem)
    return None


def prune(root: Path, *, keep_last: int, keep_best: int) -> None:
    """Remove all but the newest `keep_last` and the `keep_best` with the highest metric, and abandoned partials."""
    folders = sorted(p for p in root.glob("step_*") if _damage(p) is None)
    ranked = [(load_state(p).best_metric, p) for p in folders]
    best = sorted((m, p) for m, p in ranked if m is not None)
    kept = {*folders[-keep_last:], *(p for _, p in best[len(best) - keep_best :])}
    for folder in folders:
        if folder not in kept:
            shutil.rmtree(folder)


def _damage(folder: Path) -> str | None:
    try:
        sizes = json.loads((folder / _COMPLETE).read_text())["bytes"]
    except (OSError, json.JSONDecodeError, KeyError):
        return "it has no valid COMPLETE marker"
    for name, size in sizes.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            return f"{name} is missing or truncated"
    return None


def _sync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        else:
            _sync_folder(path)
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
