"""Checks of a folder before work that takes minutes: can it be written, is there free space, is its name short?"""

import os
import shutil
import tempfile
from pathlib import Path

SHORT = "/tmp"
_LONGEST = 107  # bytes of a Unix socket's path: Linux's sun_path, less its end; a batch job's TMPDIR may have more


class SpaceError(ValueError):
    """The disk has too little free space for the run.  The text says how much, where, and the remedy."""


class FolderError(ValueError):
    """A folder that can be neither made nor written.  The text names it, the reason and the remedy."""


def check_writable(folder: Path, *, setting: str = "output_dir") -> None:
    """Raises FolderError unless files can be made in `folder`, or else `folder` below what there is of its path.

    setting: what the user has set.  A folder is made there for a moment: permissions alone do not tell of read-only
    disks and of /proc.
    """
    try:
        Path(tempfile.mkdtemp(prefix=".tlt-", dir=_existing(folder))).rmdir()
    except (OSError, ValueError) as error:  # ValueError: a null character
        reason = getattr(error, "strerror", None) or error
        raise FolderError(
            f"{str(folder)!r} can be neither made nor written ({reason}); set {setting} to one that can"
        ) from None


def check_space(folder: Path, *, needed_bytes: int) -> None:
    """Raises SpaceError when the disk of `folder`, which need not exist yet, has less free space."""
    existing = _existing(folder)
    free = shutil.disk_usage(existing).free
    if free < needed_bytes:
        raise SpaceError(
            f"{folder} needs about {needed_bytes / 1e9:.2g} GB for checkpoints, saved steps and the final policy, "
            f"{existing} has {free / 1e9:.2g} GB free; free some space, set output_dir to another disk, or lower "
            "checkpoint.keep_last, checkpoint.keep_best and checkpoint.keep_step_files"
        )


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above that exists.  A link to nothing exists: nothing can be made there."""
    folder = folder.absolute()
    while not _is_there(folder):
        folder = folder.parent
    return folder


def _is_there(path: Path) -> bool:
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def socket_folder(wanted: str, *, behind: str) -> str:
    """`wanted`; or SHORT where the path of a socket, which goes on with `behind`, would be too long in it."""
    return wanted if len(os.fsencode(wanted + behind)) <= _LONGEST else SHORT
