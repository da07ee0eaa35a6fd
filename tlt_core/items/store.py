"""Files and folders that are written whole or not at all, and the scored responses of a step, as packed safetensors."""

import ctypes
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tlt_core.items.types import RolloutBatch, ScoredBatch

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of linux/fcntl.h and linux/fs.h


class Ref(NamedTuple):
    """A saved data set.  Ref(path="data/9f...", count=64, sha256="9f...")"""

    path: str
    count: int  # type: ignore[assignment]  # training prompts; hides tuple.count
    sha256: str


class StoreError(ValueError):
    """A file that cannot be read or written.  The text names it and the remedy."""


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Call `write` with a temporary name beside `path`, flush it to disk, rename it.  Readers see all or nothing."""
    make_folder(path.parent)
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        write(partial)
        flush(partial)
        partial.replace(path)
        flush(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def write_folder_atomically(out_dir: Path, write: Callable[[Path], None], *, keep: Collection[str] = ()) -> None:
    """Call `write` with a temporary folder beside `out_dir`, flush its files to disk, rename it.

    An existing folder is replaced, apart from its files named in `keep`.  Raises StoreError where the disk refuses; the
    existing folder is still there then, and nothing half-written is left.
    """
    partial = out_dir.with_name(f".{out_dir.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        make_folder(out_dir.parent)
        partial.mkdir()
        if _former(out_dir).exists() and not out_dir.exists():
            _former(out_dir).rename(out_dir)
        write(partial)
        for name in (n for n in keep if (out_dir / n).is_file()):
            shutil.copyfile(out_dir / name, partial / name)
        for path in (partial, *partial.rglob("*")):
            if path.is_file():
                path.chmod(0o644)  # safetensors lets only the owner read its files
            flush(path)
        put_in_place(partial, out_dir)
    except (OSError, SafetensorError) as error:
        raise StoreError(f"{out_dir} cannot be written ({error}); free some space or choose another folder") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def put_in_place(partial: Path, final: Path) -> None:
    """Give a whole folder its name, and flush that.  A folder of that name is replaced and removed.

    A kill leaves the one or the other.  Only where the file system cannot exchange two names (NFS) may it leave the
    older folder under the name `.NAME.former`; `write_folder_atomically` gives it its name back.
    """
    former = _former(final)
    if not final.exists():
        partial.rename(final)
    elif not _exchanged(partial, final):
        shutil.rmtree(former, ignore_errors=True)
        final.rename(former)
        try:
            partial.rename(final)
        except OSError:
            former.rename(final)
            raise
    flush(final.parent)
    for old in (partial, former):
        shutil.rmtree(old, ignore_errors=True)


def _former(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.former")


def _exchanged(first: Path, second: Path) -> bool:
    """Swap the names of two folders in one step.  False: their file system cannot."""
    names = [os.fsencode(first), os.fsencode(second)]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
        return True
    if (code := ctypes.get_errno()) in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(second))


def make_folder(folder: Path) -> None:
    """Make a folder and its parents where they are missing, each with its name flushed to disk."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        flush(folder.parent)


def flush(path: Path) -> None:
    """Write a file's content, or the names in a folder, to the disk itself: a power cut does not lose them."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path: Path, *, remedy: str) -> dict[str, Any]:
    """The file's one JSON object.  Raises StoreError, with the remedy, where it is missing or damaged."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise StoreError(f"{path} cannot be read as JSON ({error}); {remedy}") from None
    if not isinstance(content, dict):
        raise StoreError(f"{path} must hold a JSON object, found {type(content).__name__}; {remedy}")
    return content


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """One JSON object a line; empty where there is no file.  Half a last line, which a kill leaves, is left out.

    Raises StoreError on any other damage.
    """
    rows = []
    lines = path.read_bytes().split(b"\n") if path.is_file() else []
    for number, line in enumerate(lines, start=1):
        try:
            if line.strip():
                rows.append(content := json.loads(line))
                if not isinstance(content, dict):
                    raise ValueError(f"found {type(content).__name__}")
        except (ValueError, RecursionError) as error:
            if number < len(lines):
                raise StoreError(
                    f"{path}, line {number}: no JSON object ({error}); remove the line, or put an older copy of the "
                    "file there"
                ) from None
    return rows


def is_finite(tensor: Tensor) -> bool:
    """Whether there is no NaN and no infinity in a tensor.  One pass over it: both survive in its sum."""
    wide = torch.float32 if tensor.dtype == torch.float16 else None  # whose sums may exceed what it can hold
    return not tensor.is_floating_point() or bool(tensor.detach().sum(dtype=wide).isfinite())


def save_scored(batch: ScoredBatch, path: Path) -> None:
    """Write scored responses; the rollouts are included, so the file is enough for an update."""
    tensors = {f"rollouts.{f.name}": getattr(batch.rollouts, f.name) for f in fields(RolloutBatch)}
    tensors |= {f.name: getattr(batch, f.name) for f in fields(ScoredBatch) if f.name != "rollouts"}
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    write_atomically(path, lambda partial: save_file(contiguous, partial))


def load_scored(path: str | Path) -> ScoredBatch:
    """Read scored responses back.  Raises StoreError."""
    try:
        tensors = load_file(path)
    except (SafetensorError, FileNotFoundError) as error:
        raise StoreError(f"{path} cannot be read ({error}); remove it and run the step again") from None
    prefix = "rollouts."
    if "rollouts.sampled_T" not in tensors:
        raise StoreError(f"{path} is of an earlier release of TLT; remove it and run the step again")
    rollouts = RolloutBatch(**{k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)})
    return ScoredBatch(rollouts=rollouts, **{k: v for k, v in tensors.items() if not k.startswith(prefix)})
