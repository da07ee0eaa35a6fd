"""What the next micro-step trains on: windows of this worker's responses and of the other workers' earlier ones.

    buffer, peers -> sampler -> windows drawn -> next() -> trained()

A micro-step should take `micro_step_s`, so its rows follow the time that earlier ones took.

A worker that runs out of work early had short responses, so its own buffer has few of the long ones that the drafter is
for.  It also trains on what others decoded in earlier steps: the files of their buffers (`idle_training/buffer`) are
mapped where they lie.  A file appears whole, and stays readable after its owner has deleted it, so nobody locks or
waits.  A folder that this node cannot see has no files.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from conf.drafter import IdleTrainingConfig
from tlt_core.drafter.eagle3.windows import Window
from tlt_core.idle_training.buffer import SequenceBuffer, is_recent_and_held
from tlt_core.idle_training.sampling import WindowSampler
from tlt_core.idle_training.sequence_files import SequenceFileError, map_file
from tlt_core.items.train_sequence import TrainSequence

log = logging.getLogger(__name__)

_FIRST_ROWS = 16  # of the first micro-step, before anything was timed
_LEAST_ROWS = 4  # fewer take as long: a pass has a fixed cost
_FASTEST = 2.0  # change of a micro-step's size from one to the next: one stall must not shrink it for long
_PEER_STEPS = 6  # newest finished ones of others: with `recency` 0.5, older ones weigh less than 1 / 64


class Curriculum:
    """See the module docstring."""

    def __init__(
        self, cfg: IdleTrainingConfig, buffer: SequenceBuffer, peers: Sequence[Path], heads: Mapping[int, Tensor]
    ) -> None:
        """peers: folders of the other workers' buffers.  heads: by policy version; peers' responses of other versions
        cannot be trained on."""
        self._cfg, self._buffer, self._peers, self._heads = cfg, buffer, PeerFiles(peers), heads
        self._sampler = WindowSampler(window_rows=cfg.window_rows, length_bias=cfg.length_bias, recency=cfg.recency)
        self._step = 0
        self._sequences: dict[str, TrainSequence] | None = None  # None: to be gathered anew
        self._wanted_rows = float(_FIRST_ROWS)  # of a micro-step

    def begin_phase(self, step: int) -> None:
        """A rollout phase of this RL step begins."""
        self._step, self._sequences = step, None

    def add(self, sequence: TrainSequence) -> None:
        """Keep a finished response."""
        self._buffer.add(sequence)
        self._sequences = None

    def versions(self) -> set[int]:
        """Policy versions that sampled what is kept, here and of the peers."""
        return {s.policy_version for s in (*self._buffer.sequences(), *self._peers.sequences())}

    def sequences(self) -> dict[str, TrainSequence]:
        """What may be trained on, by id; gathered anew when something came in."""
        if self._sequences is None:
            self._peers.look(self._step)
            others = (s for s in self._peers.trainable(self._step) if s.policy_version in self._heads)
            self._sequences = {s.id: s for s in (*others, *self._buffer.trainable())}
            self._sampler.refresh(self._sequences.values(), self._step)
        return self._sequences

    def next(self, *, room: int) -> list[Window]:
        """Windows of the next micro-step: at most `room` rows, and what fits into its time."""
        self.sequences()
        return self._sampler.next(max(1, min(int(self._wanted_rows), room)))

    def trained(self, rows: int, seconds: float) -> None:
        """The windows of `next` were trained on.  Adapts the next micro-step's size.

        A pass has a fixed cost, so the rate of small passes would keep them small, and a pass that was cut short by
        `room` says nothing about larger ones.
        """
        factor = min(max(self._cfg.micro_step_s / seconds, 1 / _FASTEST), _FASTEST)
        if factor < 1 or rows > self._wanted_rows / _FASTEST:
            self._wanted_rows = min(max(self._wanted_rows * factor, _LEAST_ROWS), float(self._cfg.rows_per_step))

    def state_dict(self) -> dict[str, Any]:
        """As JSON values; the buffer has its own index."""
        return {"sampler": self._sampler.state_dict(), "wanted_rows": self._wanted_rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`."""
        self._sampler.load_state_dict(state["sampler"])
        self._wanted_rows = state["wanted_rows"]


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

    def look(self, step: int) -> None:
        """Take in what has appeared, of the steps before this one, and drop what is too old."""
        wanted = range(step - _PEER_STEPS, step)
        present = {file for folder in self._folders for file in _files(folder) if file.step in wanted}
        there = {file.path for file in present}
        # What its owner has deleted is kept, what was written again is not.
        self._mapped = {
            file: own
            for file, own in self._mapped.items()
            if file.step in wanted and (file in present or file.path not in there)
        }
        self._mapped |= {file: _map(file) for file in present - self._mapped.keys()}

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
