"""The bounded store of what the drafter is trained on: one file a step, memory-mapped.

    add -> memory --end_step(step)--> the step's file, written in the background --> mapped, and its memory freed
     `-> over a bound: evict

Evicted first are the oldest steps, and within a step the shortest responses.  The longest responses of the last
finished step (up to a third of the bounds) stay while a new step comes in: the drafter is for the tail of a rollout,
and a step's long responses come last.

Some prompts of the two newest steps are held back from training (`held_back`): candidates are measured on them.  Once
two newer steps have come in, their responses are trained on too, and no longer measured on.  So nothing is lost, and no
response is measured on after training on it.

Bounds after every `add`: `max_sequences`, and `max_bytes` in memory and mapped together.  In memory are the step that
comes in and the one that is being written.  When the disk fails, sequences stay in memory within the same bounds, and
the next `end_step` tries again.  A file outlives part of its sequences, so there is more on disk: up to twice
`max_bytes` where a step fits into it.
"""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from tlt_core.items.store import write_atomically
from tlt_core.items.train_sequence import TENSORS, TrainSequence, sequence_id
from tlt_core.items.types import NoiseKey
from tlt_core.model.sampling import splitmix64

log = logging.getLogger(__name__)

_HELD_EVERY = 4  # one prompt in so many is held back: a trial has enough responses then, and training keeps most
_HELD_STEPS = 2  # newest steps in which responses are held back: the running one may still be short of them
_KEPT_SHARE = 3  # one in so many of the bounds is for the longest of the last finished step


def held_back(step: int, prompt_id: int) -> bool:
    """Whether the responses to this prompt in this step are kept from training: other prompts in each step, the same
    ones on every worker.

    All samples of a prompt go together: they are alike, and training on one would flatter a measurement on another.
    """
    return splitmix64(splitmix64(prompt_id) + step) % _HELD_EVERY == 0


def is_recent_and_held(sequence: TrainSequence, *, newest_step: int) -> bool:
    """Whether it may not be trained on yet."""
    return sequence.step > newest_step - _HELD_STEPS and held_back(sequence.step, sequence.key.prompt_id)


@dataclass(slots=True, eq=False)
class _File:
    """Sequences that are on disk together, or on their way there."""

    path: Path
    nbytes: int  # of all sequences written to it
    ids: dict[str, None]  # of those that are still wanted, in order
    job: Future[None] | None = None  # None: it is on disk


class SequenceBuffer:
    """See the module docstring.  For one thread; `folder` belongs to this buffer alone."""

    def __init__(
        self,
        folder: Path,
        *,
        max_bytes: int,
        max_sequences: int,
        writer: Executor,
        index: Mapping[str, Any] | None = None,
    ) -> None:
        """writer: one thread, which also writes the checkpoints that name these files: they are then on disk first.
        index: of an earlier buffer, whose sequences this one has.

        A file that is missing or damaged is left out with a warning; files that the index does not name are deleted:
        they belong to steps that will be repeated.
        """
        self._folder, self._writer = folder, writer
        self._max_bytes, self._max_sequences = max_bytes, max_sequences
        self._sequences: dict[str, TrainSequence] = {}  # by id
        self._files: list[_File] = []  # oldest first
        self._bytes = 0
        for entry in [] if index is None else index["files"]:
            file = _File(folder / entry["name"], entry["bytes"], dict.fromkeys(entry["sequences"]))
            self._files.append(file)
            self._map(file)
        known = {file.path for file in self._files}
        for path in [*folder.glob("seqs_*.safetensors"), *folder.glob(".*.partial-*")]:
            if path not in known:
                path.unlink()
        self._evict()

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def tokens(self) -> int:
        """Tokens of all sequences, prompts included."""
        return sum(len(s.tokens_L) for s in self._sequences.values())

    def sequences(self) -> list[TrainSequence]:
        """All, step by step, in the order in which they came."""
        return sorted(self._sequences.values(), key=lambda s: s.step)

    @property
    def _newest_step(self) -> int:
        return max((s.step for s in self._sequences.values()), default=0)

    def trainable(self) -> list[TrainSequence]:
        """Those that may be trained on."""
        newest = self._newest_step
        return [s for s in self.sequences() if not is_recent_and_held(s, newest_step=newest)]

    def held(self) -> list[TrainSequence]:
        """Those that may not yet, of the newest step first."""
        newest = self._newest_step
        held = (s for s in self._sequences.values() if is_recent_and_held(s, newest_step=newest))
        return sorted(held, key=lambda s: (-s.step, s.key, s.first))

    def add(self, sequence: TrainSequence) -> None:
        """Keep a sequence, whose tensors must not change any more; it replaces the one of the same id."""
        if sequence.id in self._sequences:
            self._drop(self._sequences[sequence.id])
        self._insert(sequence)
        self._evict()

    def end_step(self, step: int) -> None:
        """A step is finished: write its sequences to disk, in the background."""
        self._settle()
        written = {name for file in self._files for name in file.ids}
        unwritten = (s for s in self.sequences() if s.step <= step and s.id not in written)
        for number, own in groupby(unwritten, key=lambda s: s.step):
            self._write(number, list(own))

    def index(self) -> dict[str, Any]:
        """What another buffer needs, as JSON values: files on disk or on their way there, of steps that have ended."""
        self._settle()
        files = [{"name": f.path.name, "bytes": f.nbytes, "sequences": list(f.ids)} for f in self._files if f.ids]
        return {"files": files}

    def _evict(self) -> None:
        """Drop sequences until the bounds hold."""
        protected = self._protected() if self._over() else set()
        while self._over():
            everything = self._sequences.values()
            self._drop(min(everything, key=lambda s: (s.id in protected, s.step, len(s.tokens_L), s.key, s.first)))

    def _over(self) -> bool:
        return len(self) > self._max_sequences or self._bytes > self._max_bytes

    def _protected(self) -> set[str]:
        """The longest of the step before the newest one."""
        chosen: set[str] = set()
        newest = self._newest_step
        before = [s for s in self._sequences.values() if s.step < newest]
        last = max((s.step for s in before), default=0)
        nbytes = 0
        for sequence in sorted((s for s in before if s.step == last), key=lambda s: (-len(s.tokens_L), s.key, s.first)):
            nbytes += sequence.nbytes
            if nbytes * _KEPT_SHARE > self._max_bytes or (len(chosen) + 1) * _KEPT_SHARE > self._max_sequences:
                break
            chosen.add(sequence.id)
        return chosen

    def _insert(self, sequence: TrainSequence) -> None:
        self._sequences[sequence.id] = sequence
        self._bytes += sequence.nbytes

    def _drop(self, sequence: TrainSequence) -> None:
        del self._sequences[sequence.id]
        self._bytes -= sequence.nbytes
        for file in [f for f in self._files if sequence.id in f.ids]:
            del file.ids[sequence.id]
            self._delete_if_empty(file)

    def _write(self, step: int, sequences: list[TrainSequence]) -> None:
        """Submit one file of sequences of one step.  A step that was sampled in parts has several."""
        taken, part, name = {file.path.name for file in self._files}, 0, f"seqs_{step:06d}.safetensors"
        while name in taken:
            part += 1
            name = f"seqs_{step:06d}.{part}.safetensors"
        path = self._folder / name
        job = self._writer.submit(write_atomically, path, lambda partial: write_sequences(partial, sequences))
        self._files.append(_File(path, sum(s.nbytes for s in sequences), dict.fromkeys(s.id for s in sequences), job))

    def _settle(self) -> None:
        """Map what has been written since the last call."""
        for file in list(self._files):
            if file.job is None or not file.job.done():
                continue
            error, file.job = file.job.exception(), None
            if error is not None:
                self._give_up(file, f"was not written ({error})")
            elif file.ids:
                self._map(file)
            self._delete_if_empty(file)

    def _map(self, file: _File) -> None:
        """Put the mapped sequences in the place of those in memory, or, where there are none, beside the others."""
        try:
            mapped = map_sequences(file.path, file.ids, nbytes=file.nbytes)
        except SequenceFileError as error:
            self._give_up(file, str(error))
            return
        for sequence in mapped:
            if sequence.id in self._sequences:
                self._sequences[sequence.id] = sequence
            else:
                self._insert(sequence)

    def _give_up(self, file: _File, reason: str) -> None:
        log.warning("%s %s: its %d sequences are not on disk", file.path, reason, len(file.ids))
        self._files.remove(file)

    def _delete_if_empty(self, file: _File) -> None:
        if not file.ids and file.job is None and file in self._files:
            self._files.remove(file)
            file.path.unlink(missing_ok=True)


class SequenceFileError(ValueError):
    """A file of sequences that cannot be used.  The text says why."""


def write_sequences(path: Path, sequences: Sequence[TrainSequence]) -> None:
    """One safetensors file that holds all of them."""
    headers = [[s.key, s.policy_version, s.stream, s.first] for s in sequences]
    tensors = {f"{s.id}/{name}": tensor for s in sequences for name, tensor in s.tensors.items()}
    save_file(tensors, path, metadata={"sequences": json.dumps(headers)})


def map_sequences(path: Path, ids: Iterable[str], *, nbytes: int) -> list[TrainSequence]:
    """The named sequences of a file, memory-mapped.  They stay readable when the file is deleted or replaced.

    nbytes: of all sequences that the file should hold.  Raises SequenceFileError when it is missing, truncated, of
    another size, or lacks one of the sequences.
    """
    by_id = {sequence.id: sequence for sequence in map_file(path)}
    found = sum(sequence.nbytes for sequence in by_id.values())
    if found != nbytes:
        raise SequenceFileError(f"holds {found} bytes of sequences, not {nbytes}")
    if missing := [wanted for wanted in ids if wanted not in by_id]:
        raise SequenceFileError(f"lacks the sequence {missing[0]}")
    return [by_id[wanted] for wanted in ids]


def map_file(path: Path) -> list[TrainSequence]:
    """All sequences of a file, memory-mapped.  Raises SequenceFileError when it is missing or damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            return [_read(file, *header) for header in json.loads(file.metadata()["sequences"])]
    except (OSError, SafetensorError) as error:
        raise SequenceFileError(f"cannot be read ({error})") from None
    except (KeyError, TypeError, ValueError) as error:
        raise SequenceFileError(f"is not a file of sequences ({error!r})") from None


def _read(file: safe_open, key: Sequence[int], policy_version: int, stream: int, first: int) -> TrainSequence:
    prefix = sequence_id(key, first)
    tensors = {name: file.get_tensor(f"{prefix}/{name}") for name in TENSORS}
    return TrainSequence(key=NoiseKey(*key), policy_version=policy_version, stream=stream, first=first, **tensors)
