"""What the next micro-step trains on: windows of this worker's responses and of the other workers' earlier ones.

    buffer, peers -> sampler -> windows drawn -> next() -> trained()

A micro-step should take `micro_step_s`, so its rows follow the time that earlier ones took.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from conf.drafter import IdleTrainingConfig
from tlt_core.drafter.eagle3.windows import Window
from tlt_core.idle_training.buffer import SequenceBuffer
from tlt_core.idle_training.peers import PeerFiles
from tlt_core.idle_training.sampling import WindowSampler
from tlt_core.items.train_sequence import TrainSequence

_FIRST_ROWS = 16  # of the first micro-step, before anything was timed
_LEAST_ROWS = 4  # fewer take as long: a pass has a fixed cost
_FASTEST = 2.0  # change of a micro-step's size from one to the next: one stall must not shrink it for long


class Curriculum:
    """See the module docstring."""

    def __init__(
        self, cfg: IdleTrainingConfig, buffer: SequenceBuffer, peers: PeerFiles, heads: Mapping[int, Tensor]
    ) -> None:
        """heads: by policy version; peers' responses of other versions cannot be trained on."""
        self._cfg, self._buffer, self._peers, self._heads = cfg, buffer, peers, heads
        self._sampler = WindowSampler(window_rows=cfg.window_rows, length_bias=cfg.length_bias, recency=cfg.recency)
        self._step = 0
        self._sequences: dict[str, TrainSequence] | None = None  # None: to be gathered anew
        self._more_of_peers = False
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
