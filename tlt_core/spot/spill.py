"""The buffer's files: which sequences are on disk, or on their way there, and when a file can go.

write(sequences) -> being written -> written --map_oldest--> mapped;  forget the last sequence of a file: deleted
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tlt_core.spot.sequence import SequenceFileError, StoredSequence, map_sequences, write_sequences
from tlt_core.spot.writer import BackgroundWriter, WriteJob

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _File:
    """Sequences that are on disk together."""

    path: Path
    nbytes: int  # of all sequences written to it
    names: dict[str, None]  # of those that are still wanted, in order
    job: WriteJob | None  # None: found on disk
    mapped: bool = False

    @property
    def written(self) -> bool:
        return self.job is None or self.job.done


class SpillFiles:
    """Owned by `SequenceBuffer`, which owns the sequences.  `folder` holds no other files of these names."""

    def __init__(self, folder: Path, writer: BackgroundWriter) -> None:
        self._folder, self._writer = folder, writer
        self._files: list[_File] = []  # oldest first
        self._file_of: dict[str, _File] = {}

    def __contains__(self, name: str) -> bool:
        """Is the sequence on disk, or on its way there?"""
        return name in self._file_of

    def write(self, sequences: Sequence[StoredSequence]) -> None:
        """Submit one file of sequences of one step."""
        stem = f"seqs_{sequences[0].step:06d}"
        taken, part, name = {file.path.name for file in self._files}, 0, f"{stem}.safetensors"
        while name in taken:
            part += 1
            name = f"{stem}.{part}.safetensors"
        job = self._writer.submit(self._folder / name, lambda path: write_sequences(path, sequences), raises=False)
        names = dict.fromkeys(s.id for s in sequences)
        self._hold(_File(job.target, sum(s.nbytes for s in sequences), names, job))

    def forget(self, name: str) -> None:
        """The sequence is not wanted any more."""
        file = self._file_of.pop(name, None)
        if file is not None:
            del file.names[name]
            self._delete_if_empty(file)

    def settle(self) -> bool:
        """Take notice of ended writes.  True: one of them failed, and its sequences are in memory alone."""
        failed = False
        for file in [f for f in self._files if f.written]:
            if file.job is not None and file.job.error is not None:
                self._give_up(file, f"was not written ({file.job.error})")
                failed = True
            else:
                self._delete_if_empty(file)
        return failed

    def wait_for_oldest(self) -> bool:
        """Until the oldest write under way has ended; False when there is none."""
        job = next((f.job for f in self._files if f.job is not None and not f.job.done), None)
        if job is None:
            return False
        job.wait()
        return True

    def map_oldest(self) -> dict[str, StoredSequence]:
        """Map the oldest written file that is not mapped yet; empty when there is none."""
        for file in [f for f in self._files if f.written and f.names and not f.mapped]:
            try:
                mapped = map_sequences(file.path, file.names, nbytes=file.nbytes)
            except SequenceFileError as error:
                self._give_up(file, str(error))
                continue
            file.mapped = True
            return mapped
        return {}

    def index(self) -> list[dict[str, Any]]:
        """The files as JSON values."""
        return [{"name": f.path.name, "bytes": f.nbytes, "sequences": list(f.names)} for f in self._files if f.names]

    def adopt(self, entry: Mapping[str, Any]) -> dict[str, StoredSequence]:
        """Map a file of an `index`; empty, with a warning, when it is missing or damaged."""
        file = _File(self._folder / entry["name"], entry["bytes"], dict.fromkeys(entry["sequences"]), job=None)
        self._hold(file)
        return self.map_oldest()

    def delete_others(self) -> None:
        """Delete files of sequences that are not among these: left by steps that will be repeated."""
        known = {file.path for file in self._files}
        for path in [*self._folder.glob("seqs_*.safetensors"), *self._folder.glob(".seqs_*.safetensors.partial-*")]:
            if path not in known:
                path.unlink()

    def _hold(self, file: _File) -> None:
        self._files.append(file)
        self._file_of |= dict.fromkeys(file.names, file)

    def _give_up(self, file: _File, reason: str) -> None:
        log.warning("%s %s: its %d sequences are not on disk", file.path, reason, len(file.names))
        self._files.remove(file)
        for name in file.names:
            del self._file_of[name]

    def _delete_if_empty(self, file: _File) -> None:
        if not file.names and file.written:
            self._files.remove(file)
            file.path.unlink(missing_ok=True)
