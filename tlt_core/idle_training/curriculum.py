"""What the next micro-step trains on: windows of this worker's responses and of the other workers' earlier ones.

    buffer, peers -> sampler -> windows drawn -> next() -> trained()

A micro-step should take `micro_step_s`, so its rows follow the time that earlier ones took.

A worker that runs out of work early had short responses.  So it also trains on what others decoded in earlier steps:
the files of their buffers are mapped where they lie.  A file appears whole, and stays readable after its owner has
deleted it, so nobody locks or waits.  A folder that this node cannot see has no files.
"""

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from conf.drafter import IdleTrainingConfig
from tlt_core.drafter.eagle3.windows import Window
from tlt_core.idle_training.buffer import SequenceBuffer, SequenceFileError, is_recent_and_held, map_file
from tlt_core.items.train_sequence import TrainSequence

_FIRST_ROWS = 16  # of the first micro-step, before anything was timed
_LEAST_ROWS = 4  # fewer take as long: a pass has a fixed cost
_FASTEST = 2.0  # change of a micro-step's size from one to the next: one stall must not shrink it for long
OLDEST_AGE = 6  # steps after which a sequence is drawn no more rarely
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
    step: int
    path: str
    written_ns: int  # a step that is repeated writes its file again


class PeerFiles:
    """Read only.  `folders`: of the other workers' buffers."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = tuple(folders)
        self._mapped: dict[_File, list[TrainSequence]] = {}

    def look(self, step: int) -> None:
        """Take in what is there of the steps before this one, the oldest left out."""
        wanted = range(step - _PEER_STEPS, step)
        present = sorted(file for folder in self._folders for file in _files(folder) if file.step in wanted)
        self._mapped = {file: self._mapped[file] if file in self._mapped else _map(file) for file in present}

    def sequences(self) -> list[TrainSequence]:
        """All that were taken in."""
        return [s for own in self._mapped.values() for s in own]

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
    except SequenceFileError:
        return []


@dataclass(slots=True)
class _Flow:
    """One sequence in the queue."""

    rows: int
    step: int
    start_time: float  # virtual time at which its next window is due
    cursor: int = 0  # row at which that window begins


class WindowSampler:
    """Which rows the drafter is trained on next: a fair queue of windows.

    refresh(what there is), then next(max_rows) -> the windows of one training step, again and again.  Equal calls give
    equal picks, whatever the order of the sequences.

    A sequence of R rows is cut into ceil(R / window_rows) windows of nearly equal size, visited in turn.  Cutting loses
    nothing: a window is trained with the whole context before it.

    The law.  Of all trained rows, sequence i gets the share w_i / W, where W is the sum of all w and

        w_i = R_i ^ (1 + length_bias) * recency ^ min(current step - step_i, OLDEST_AGE)

    so that long and recent sequences are preferred.  Sequences are served in the order of virtual start times
    ("start-time fair queueing": Goyal, Vin, Cheng, SIGCOMM 1996): a visit of n rows moves the start time on by n / w_i,
    and the earliest is next.  No random number is drawn, so a resumed run repeats the picks.

    Two bounds follow, with m_i the rows of the largest window of i:
    - law: between any two moments, |rows_i / w_i - rows_j / w_j| <= m_i / w_i + m_j / w_j;
    - no starvation: between two visits of the same window of i, no more than R_i * W / w_i + (sum of m) rows are
      trained, with W / w_i at its largest in between and the sum over all sequences that were there.  OLDEST_AGE keeps
      this finite however long a sequence stays.
    """

    def __init__(self, *, window_rows: int, length_bias: float = 0.5, recency: float = 0.5) -> None:
        """window_rows: of one window at most; recency: weight of a sequence relative to one of the step after."""
        self._window_rows, self._length_bias, self._recency = window_rows, length_bias, recency
        self._step = 0
        self._now = 0.0  # virtual time: when the latest pick was due
        self._sequences: dict[str, TrainSequence] = {}
        self._flows: dict[str, _Flow] = {}
        self._queue: list[tuple[float, float, str]] = []  # (start time, -weight, id): the long one first when equal

    def refresh(self, sequences: Iterable[TrainSequence], step: int) -> None:
        """Choose from these from now on; `step`: the current RL step.

        New sequences are due now: they neither wait nor catch up with what others got before them.  All have rows.
        """
        self._sequences = by_id = {sequence.id: sequence for sequence in sequences}
        if by_id.keys() == self._flows.keys() and step == self._step:
            return  # a resumed run may ask once more than the uninterrupted one; the picks must not differ in a bit
        flows = {}
        for name, sequence in by_id.items():
            flow = self._flows.get(name)
            if flow is None:
                flows[name] = _Flow(sequence.rows, sequence.step, start_time=0.0)
                continue
            # The rows that it still waits for stay, in the virtual time of its new weight.
            faster = self._weight(flow, self._step) / self._weight(flow, step)
            flow.start_time = (flow.start_time - self._now) * faster
            flows[name] = flow
        self._flows, self._step, self._now = flows, step, 0.0
        self._rebuild()

    def next(self, max_rows: int) -> list[Window]:
        """Windows of the next training step, max_rows rows at most; empty when there is no sequence.

        A window that is too large even when alone is given in parts.  No window comes twice: a step ends early when
        one is due again.
        """
        picked: list[Window] = []
        starts: set[tuple[str, int]] = set()
        room = max_rows
        while self._queue and room:
            _, _, name = self._queue[0]
            flow = self._flows[name]
            end = self._window_end(flow)
            if (name, flow.cursor) in starts or (picked and end - flow.cursor > room):
                break
            starts.add((name, flow.cursor))
            picked.append(self._visit(name, min(end, flow.cursor + room)))
            room -= picked[-1].end - picked[-1].start
        return picked

    def state_dict(self) -> dict[str, Any]:
        """The queue as JSON values."""
        flows = {name: [f.rows, f.step, f.start_time, f.cursor] for name, f in self._flows.items()}
        return {"step": self._step, "now": self._now, "flows": flows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as the sampler would have that returned this; call `refresh` with what is still there."""
        self._step, self._now = state["step"], state["now"]
        self._flows = {name: _Flow(*values) for name, values in state["flows"].items()}
        self._rebuild()

    def _visit(self, name: str, end: int) -> Window:
        """Take the rows up to `end` of the sequence that is due."""
        self._now, tie, _ = self._queue[0]
        flow = self._flows[name]
        sequence = self._sequences[name]
        window = Window(sequence, sequence.earliest + flow.cursor, sequence.earliest + end)
        flow.start_time += (end - flow.cursor) / -tie
        flow.cursor = end % flow.rows
        heapq.heapreplace(self._queue, (flow.start_time, tie, name))
        return window

    def _window_end(self, flow: _Flow) -> int:
        """End of the window in which the cursor is."""
        windows = -(-flow.rows // self._window_rows)
        index = ((flow.cursor + 1) * windows - 1) // flow.rows  # window k is k * rows // windows .. (k + 1) * ...
        return (index + 1) * flow.rows // windows

    def _weight(self, flow: _Flow, step: int) -> float:
        age = min(max(step - flow.step, 0), OLDEST_AGE)
        return float(flow.rows ** (1 + self._length_bias) * self._recency**age)

    def _rebuild(self) -> None:
        self._queue = [(f.start_time, -self._weight(f, self._step), name) for name, f in self._flows.items()]
        heapq.heapify(self._queue)
