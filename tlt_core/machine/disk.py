"""Check for free space on the disk before work that takes minutes."""

import shutil
from pathlib import Path


class SpaceError(ValueError):
    """The disk has too little free space for the run.  The text says how much, where, and the remedy."""


def check_space(folder: Path, *, needed_bytes: int) -> None:
    """Raises SpaceError when the disk of `folder`, which need not exist yet, has less free space."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if free < needed_bytes:
        raise SpaceError(
            f"{folder} needs about {needed_bytes / 1e9:.2g} GB for checkpoints, saved steps and the final policy, "
            f"{existing} has {free / 1e9:.2g} GB free; free some space, set output_dir to another disk, or lower "
            "checkpoint.keep_last, checkpoint.keep_best and checkpoint.keep_step_files"
        )
