"""The bounded store of what the drafter is trained on: newest steps in memory, older ones memory-mapped.

    add -> memory --spill(step)--> file of the step (written in the background) --memory short--> mapped, memory freed
     `-> over a bound: evict

Evicted first are the oldest steps, and within a step the shortest responses.  But the longest of the last finished
step (up to a third of the bounds) stay while a new step comes in: the tail is what the drafter is for, and a step's
long responses come last.

Held back from training are some prompts of the two newest steps (`held_back`), on which candidates are measured.  When
a newer step comes in, the oldest of these are measured on no more, and are trained on: nothing is lost, and nothing is
measured on that was trained on.  (A prompt that comes again in a later epoch is another response, of another policy.)

Bounds after every `add`: `max_sequences`; `max_bytes` of sequences; of them in memory `max_ram_bytes` and two sequences
more.  To keep the last one, a step that is larger than half of `max_ram_bytes` is written in parts before it is over,
and `add` waits when the disk falls behind by as much.  A file outlives part of its sequences, so there is more on disk:
up to twice `max_bytes` where a step fits into it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tlt_core.spot.sequence import StoredSequence
from tlt_core.spot.spill import SpillFiles
from tlt_core.spot.writer import BackgroundWriter

__all__ = ["SequenceBuffer", "StoredSequence", "held_back"]

HELD_EVERY = 4  # prompts, one of which is held back
_HELD_STEPS = 2  # newest ones, in which responses are held back
_KEPT_SHARE = 3  # of the bounds, for the longest of the last finished step: one in so many
_MASK = 2**64 - 1


def held_back(step: int, prompt_id: int, *, every: int = HELD_EVERY) -> bool:
    """Whether the responses to this prompt in this step are kept from training: one prompt in `every`, others in each
    step, the same ones on every worker.

    All samples of a prompt together: siblings are alike, and one that was trained on would vouch for the others.
    By splitmix64's finaliser (Steele, Lea, Flood, OOPSLA 2014), so that neighbours are independent.
    """
    return _mixed(_mixed(prompt_id) + step) % every == 0


def is_recent_and_held(sequence: StoredSequence, *, newest_step: int, every: int = HELD_EVERY) -> bool:
    """Whether it may not be trained on yet."""
    is_recent = sequence.step > newest_step - _HELD_STEPS
    return is_recent and held_back(sequence.step, sequence.key.prompt_id, every=every)


def _mixed(number: int) -> int:
    z = (number + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


class SequenceBuffer:
    """See the module docstring.  For one thread; `folder` belongs to this buffer alone."""

    def __init__(
        self,
        folder: Path,
        *,
        max_bytes: int,
        max_ram_bytes: int,
        max_sequences: int,
        held_every: int = HELD_EVERY,
        writer: BackgroundWriter | None = None,
    ) -> None:
        """held_every: one prompt of a step in so many is held back.  writer: the one that also writes the checkpoints
        that name these files, which are then never on disk before them; None: one of its own."""
        if min(max_bytes, max_ram_bytes, max_sequences) < 1 or held_every < 2:
            raise ValueError(
                f"max_bytes {max_bytes}, max_ram_bytes {max_ram_bytes} or max_sequences {max_sequences} < 1, or "
                f"held_every {held_every} < 2"
            )
        self._max_bytes, self._max_ram_bytes, self._max_sequences = max_bytes, max_ram_bytes, max_sequences
        self._held_every = held_every
        self._files = SpillFiles(folder, writer or BackgroundWriter())
        self._sequences: dict[str, StoredSequence] = {}
        self._names_of_step: dict[int, set[str]] = {}
        self._mapped: set[str] = set()
        self._bytes = self._ram_bytes = self._tokens = 0
        self._disk_failed = False  # memory is then bounded by eviction

    @classmethod
    def open(cls, folder: Path, index: Mapping[str, Any], **settings: Any) -> "SequenceBuffer":
        """The buffer that gave this `index`, with the settings of the constructor.

        A file that is missing or damaged is left out with a warning; files that the index does not name are deleted.
        """
        buffer = cls(folder, **settings)
        for entry in index["files"]:
            for sequence in buffer._files.adopt(entry).values():
                buffer._insert(sequence, mapped=True)
        buffer._files.delete_others()
        buffer._evict()
        return buffer

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def tokens(self) -> int:
        """Tokens of all sequences, prompts included."""
        return self._tokens

    @property
    def nbytes(self) -> int:
        """Bytes of all sequences."""
        return self._bytes

    @property
    def ram_bytes(self) -> int:
        """Bytes of those that are not memory-mapped."""
        return self._ram_bytes

    def sequences(self) -> list[StoredSequence]:
        """All, in the order in which they came."""
        return list(self._sequences.values())

    def trainable(self) -> list[StoredSequence]:
        """Those that may be trained on."""
        return [s for s in self._sequences.values() if not self._is_held(s)]

    def held(self) -> list[StoredSequence]:
        """Those that may not yet, of the newest step first."""
        held = (s for s in self._sequences.values() if self._is_held(s))
        return sorted(held, key=lambda s: (-s.step, s.key))

    def add(self, sequence: StoredSequence) -> bool:
        """Keep a sequence, whose tensors must not change any more; it replaces the one of the same id.

        False: the bounds have no room for it.
        """
        self._drop(sequence.id)
        self._insert(sequence.owned(), mapped=False)
        self._evict()
        self._relieve_memory()
        return sequence.id in self._sequences

    def spill(self, step: int) -> None:
        """A step is finished: write its sequences to disk, in the background."""
        self._disk_failed = False  # after a failure: try again
        self._write(last_step=step)
        self._relieve_memory()

    def index(self) -> dict[str, Any]:
        """What `open` needs, as JSON values: the sequences on disk or on their way there, which are those of all steps
        that were spilled."""
        self._settle()
        return {"files": self._files.index()}

    def _evict(self) -> None:
        """Drop sequences until the bounds hold."""
        protected = self._protected() if self._over() else set()
        while self._over():
            open_steps = (names - protected for _, names in sorted(self._names_of_step.items()))
            names = next((names for names in open_steps if names), protected)
            victim = min((self._sequences[name] for name in names), key=lambda s: (len(s.tokens_L), s.key))
            self._drop(victim.id)
            protected.discard(victim.id)

    def _over(self) -> bool:
        short_of_memory = self._disk_failed and self._ram_bytes > self._max_ram_bytes
        return len(self) > self._max_sequences or self._bytes > self._max_bytes or short_of_memory

    def _protected(self) -> set[str]:
        """The longest of the step before the newest one."""
        chosen: set[str] = set()
        if len(self._names_of_step) < 2:
            return chosen
        last, nbytes = sorted(self._names_of_step)[-2], 0
        sequences = [self._sequences[name] for name in self._names_of_step[last]]
        for sequence in sorted(sequences, key=lambda s: (-len(s.tokens_L), s.key)):
            nbytes += sequence.nbytes
            if nbytes * _KEPT_SHARE > self._max_bytes or (len(chosen) + 1) * _KEPT_SHARE > self._max_sequences:
                break
            chosen.add(sequence.id)
        return chosen

    def _relieve_memory(self) -> None:
        self._settle()
        if 2 * sum(s.nbytes for s in self._unspilled()) > self._max_ram_bytes and not self._disk_failed:
            self._write(last_step=None)
        self._map_until_enough()
        while self._ram_bytes > self._max_ram_bytes and self._files.wait_for_oldest():
            self._settle()
            self._map_until_enough()

    def _map_until_enough(self) -> None:
        while self._ram_bytes > self._max_ram_bytes and (mapped := self._files.map_oldest()):
            self._sequences |= mapped  # keeps the order
            self._mapped |= mapped.keys()
            self._ram_bytes -= sum(s.nbytes for s in mapped.values())

    def _settle(self) -> None:
        if self._files.settle():
            self._disk_failed = True
            self._evict()

    def _unspilled(self) -> list[StoredSequence]:
        return [s for name, s in self._sequences.items() if name not in self._files]

    def _write(self, *, last_step: int | None) -> None:
        """Write what is in no file yet, up to this step; None: all."""
        unspilled = [s for s in self._unspilled() if last_step is None or s.step <= last_step]
        for step in sorted({s.step for s in unspilled}):
            self._files.write([s for s in unspilled if s.step == step])

    def _is_held(self, sequence: StoredSequence) -> bool:
        return is_recent_and_held(sequence, newest_step=max(self._names_of_step), every=self._held_every)

    def _insert(self, sequence: StoredSequence, *, mapped: bool) -> None:
        self._sequences[sequence.id] = sequence
        self._names_of_step.setdefault(sequence.step, set()).add(sequence.id)
        self._tokens += len(sequence.tokens_L)
        self._bytes += sequence.nbytes
        if mapped:
            self._mapped.add(sequence.id)
        else:
            self._ram_bytes += sequence.nbytes

    def _drop(self, name: str) -> None:
        """Forget a sequence, if there is one of this name."""
        sequence = self._sequences.pop(name, None)
        if sequence is None:
            return
        self._names_of_step[sequence.step].remove(name)
        if not self._names_of_step[sequence.step]:
            del self._names_of_step[sequence.step]
        self._tokens -= len(sequence.tokens_L)
        self._bytes -= sequence.nbytes
        self._ram_bytes -= 0 if name in self._mapped else sequence.nbytes
        self._mapped.discard(name)
        self._files.forget(name)
