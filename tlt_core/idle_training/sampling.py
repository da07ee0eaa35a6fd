"""Which rows the drafter is trained on next: a fair queue of windows.

    refresh(what the buffer holds), then next(max_rows) -> the windows of one training step, again and again

A sequence of R rows is cut into ceil(R / window_rows) windows of nearly equal size, visited in turn.  Cutting loses
nothing: a window is trained with the whole context before it.

The law.  Of all trained rows, sequence i gets the share w_i / W, where W is the sum of all w and

    w_i = R_i ^ (1 + length_bias) * recency ^ min(current step - step_i, OLDEST_AGE)

so that long and recent sequences are preferred.  Sequences are served in the order of virtual start times
("start-time fair queueing": Goyal, Vin, Cheng, SIGCOMM 1996): a visit of n rows moves the start time on by n / w_i,
and the earliest is next.  No random number is drawn, so a resumed run repeats the picks.

Two bounds follow, with m_i the rows of the largest window of i:
- law: between any two moments, |rows_i / w_i - rows_j / w_j| <= m_i / w_i + m_j / w_j;
- no starvation: between two visits of the same window of i, no more than R_i * W / w_i + (sum of m) rows are trained,
  with W / w_i at its largest in between and the sum over all sequences that were there.  OLDEST_AGE keeps this finite
  however long a sequence stays.
"""

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tlt_core.drafter.eagle3.windows import Window
from tlt_core.items.train_sequence import TrainSequence

OLDEST_AGE = 6


@dataclass(slots=True)
class _Flow:
    """One sequence in the queue."""

    rows: int
    step: int
    start_time: float  # virtual time at which its next window is due
    cursor: int = 0  # row at which that window begins


class WindowSampler:
    """Holds the queue.  Equal calls give equal picks, whatever the order of the sequences."""

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
