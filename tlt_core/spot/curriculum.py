"""What the next micro-step trains on: windows of this worker's responses and of the other workers' earlier ones.

    buffer, peers -> sampler -> windows drawn -> next() -> trained(), or given_up() and the same windows again

A micro-step should take `micro_step_s`, so its rows follow the time that earlier ones took.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from conf.drafter import SpotConfig
from tlt_core.drafter.eagle3.windows import Window
from tlt_core.items.train_sequence import TrainSequence
from tlt_core.spot.buffer import SequenceBuffer
from tlt_core.spot.peers import PeerFiles
from tlt_core.spot.sampling import WindowRef, WindowSampler

_FIRST_ROWS = 16  # of the first micro-step, before anything was timed
_LEAST_ROWS = 4
_FASTEST = 2.0  # change of a micro-step's size from one to the next


class Curriculum:
    """See the module docstring."""

    def __init__(self, cfg: SpotConfig, buffer: SequenceBuffer, peers: PeerFiles, heads: Mapping[int, Tensor]) -> None:
        """heads: by policy version; peers' responses of other versions cannot be trained on."""
        self._cfg, self._buffer, self._peers, self._heads = cfg, buffer, peers, heads
        self._sampler = WindowSampler(window_rows=cfg.window_rows, length_bias=cfg.length_bias, recency=cfg.recency)
        self._step = 0
        self._sequences: dict[str, TrainSequence] | None = None  # None: to be gathered anew
        self._more_of_peers = False
        self._drawn: list[WindowRef] = []  # not trained on yet: given up, or the rest of a smaller pass
        self._rest: list[WindowRef] = []  # of those drawn, behind the windows of the pass under way
        self._given_up = 0  # times in a row
        self._wanted_rows = float(_FIRST_ROWS)  # of a micro-step

    def begin_phase(self, step: int) -> None:
        """A rollout phase of this RL step begins."""
        self._step, self._sequences = step, None

    def add(self, sequence: TrainSequence) -> None:
        """Keep a finished response."""
        self._buffer.add(sequence)
        self._sequences = None

    def sequences(self) -> dict[str, TrainSequence]:
        """What may be trained on, by id; gathered anew when something came in."""
        if self._sequences is None or self._more_of_peers:
            self._more_of_peers = self._peers.look(self._step)
            others = (s for s in self._peers.trainable(self._step) if s.policy_version in self._heads)
            self._sequences = {s.id: s for s in (*others, *self._buffer.trainable())}
            self._sampler.refresh(self._sequences.values(), self._step)
        return self._sequences

    def next(self, *, room: int, share: float) -> list[Window]:
        """Windows of the next micro-step: at most `room` rows, and this share of what fits into its time."""
        sequences = self.sequences()
        self._drawn = [ref for ref in self._drawn if ref.id in sequences]
        if not self._drawn:
            self._drawn = self._sampler.next(max(1, min(int(self._wanted_rows * share), room)))
        chosen, self._rest = self._divided()
        windows = []
        for ref in chosen:
            sequence = sequences[ref.id]
            windows.append(Window(sequence, sequence.earliest + ref.start, sequence.earliest + ref.end))
        return windows

    def trained(self, rows: int, seconds: float) -> None:
        """The windows of `next` were trained on.  Adapts the next micro-step's size.

        A pass has a fixed cost, so the rate of small passes would keep them small, and a pass that was cut short says
        nothing about larger ones.
        """
        self._drawn, self._given_up = self._rest, 0
        factor = min(max(self._cfg.micro_step_s / seconds, 1 / _FASTEST), _FASTEST)
        if factor < 1 or rows > self._wanted_rows / _FASTEST:
            self._wanted_rows = min(max(self._wanted_rows * factor, _LEAST_ROWS), float(self._cfg.rows_per_step))

    def given_up(self) -> None:
        """The pass over the windows of `next` was given up: they come again."""
        self._given_up += 1

    def _divided(self) -> tuple[list[WindowRef], list[WindowRef]]:
        """The windows drawn, divided into the next pass and the rest.

        The next pass takes all of them, and less after two passes were given up in a row: where idle time is always
        shorter than a pass, nothing would ever be learnt.
        """
        room = sum(ref.end - ref.start for ref in self._drawn)
        if self._given_up >= 2:
            room = max(room >> self._given_up - 1, _LEAST_ROWS)
        chosen, rest = list[WindowRef](), list[WindowRef]()
        for ref in self._drawn:
            cut = min(ref.start + room, ref.end)
            room -= cut - ref.start
            chosen += [ref._replace(end=cut)] if cut > ref.start else []
            rest += [ref._replace(start=cut)] if cut < ref.end else []
        return chosen, rest

    def state_dict(self) -> dict[str, Any]:
        """As JSON values; the buffer has its own index."""
        return {
            "sampler": self._sampler.state_dict(),
            "drawn": self._drawn,
            "given_up": self._given_up,
            "wanted_rows": self._wanted_rows,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`."""
        self._sampler.load_state_dict(state["sampler"])
        self._drawn = [WindowRef(*ref) for ref in state["drawn"]]
        self._given_up, self._wanted_rows = state["given_up"], state["wanted_rows"]
