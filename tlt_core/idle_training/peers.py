"""Responses of the other workers: their buffers' files, read where they lie.

A worker that runs out of work early had short responses, so its own buffer has few of the long ones that the drafter is
for.  It also trains on what others decoded in earlier steps: their files (`idle_training/buffer`) are mapped when
they appear.
A file appears whole, and stays readable after its owner has deleted it, so nobody locks or waits.  A folder that this
node cannot see has no files.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tlt_core.idle_training.buffer import is_recent_and_held
from tlt_core.idle_training.sequence_files import SequenceFileError, map_file
from tlt_core.items.train_sequence import TrainSequence

log = logging.getLogger(__name__)

_STEPS = 6  # newest finished ones that are read: with `recency` 0.5, older ones weigh less than 1 / 64
_FILES_AT_ONCE = 4  # opening one takes milliseconds, and a worker must be able to stop


class _File(NamedTuple):
    """A step that is repeated writes its file again."""

    step: int
    path: str
    written_ns: int


class PeerFiles:
    """Read only.  `folders`: of the other workers' buffers."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = tuple(folders)
        self._mapped: dict[_File, list[TrainSequence]] = {}

    def look(self, step: int) -> bool:
        """Take in some of what has appeared, of the steps before this one, and drop what is too old.  True: there is
        more."""
        wanted = range(step - _STEPS, step)
        present = {file for folder in self._folders for file in _files(folder) if file.step in wanted}
        there = {file.path for file in present}
        # What its owner has deleted is kept, what was written again is not.
        self._mapped = {
            file: own
            for file, own in self._mapped.items()
            if file.step in wanted and (file in present or file.path not in there)
        }
        new = sorted(present - self._mapped.keys(), reverse=True)
        self._mapped |= {file: _map(file) for file in new[:_FILES_AT_ONCE]}
        return len(new) > _FILES_AT_ONCE

    def sequences(self) -> list[TrainSequence]:
        """All that were taken in."""
        return [s for file in sorted(self._mapped) for s in self._mapped[file]]

    def trainable(self, step: int) -> list[TrainSequence]:
        """What may be trained on; held back are the same prompts as at their owner's."""
        return [s for s in self.sequences() if not is_recent_and_held(s, newest_step=step)]


def _files(folder: Path) -> Iterator[_File]:
    for path in folder.glob("seqs_*.safetensors"):
        with suppress(FileNotFoundError):  # its owner has just deleted it
            yield _File(int(path.name[5:11]), str(path), path.stat().st_mtime_ns)


def _map(file: _File) -> list[TrainSequence]:
    """Nothing of a file that cannot be read: it is its owner's to complain."""
    try:
        return map_file(Path(file.path))
    except SequenceFileError as error:
        log.debug("%s %s", file.path, error)
        return []
