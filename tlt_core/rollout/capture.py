"""Training data of the drafter as a by-product of decoding: what the target computed for each finished response.

    rounds --record--> buffers, a slot a live row --finish--> TrainSequence

Nothing is computed here: hidden states were computed by the target's passes, and log-normalisers by sampling.

Shapes: T recorded positions, E tapped width, D hidden size.
"""

import torch

from tlt_core.items.hidden_states import HiddenStates, PathStates
from tlt_core.items.train_sequence import TrainSequence
from tlt_core.items.types import Rollout
from tlt_core.model.sampling import stream_key


class Capture:
    """Keeps, beside the tapped hidden states, what a sampled token's distribution can be restored from."""

    def __init__(self, hidden: HiddenStates, *, size: int) -> None:
        """hidden: the engine's, which records the taps and says in which slot a row is.  size: D."""
        self._hidden, self._size = hidden, size
        self.acquire()

    def acquire(self) -> None:
        """Take the memory, after `hidden` took its own."""
        taps_SCE = self._hidden.taps_SCE
        self._last_SCD = taps_SCE.new_zeros(*taps_SCE.shape[:2], self._size)
        self._lognorms_SC = taps_SCE.new_zeros(taps_SCE.shape[:2], dtype=torch.float32)

    def release(self) -> None:
        """Give it back; what was recorded of unfinished responses is gone."""
        self._last_SCD, self._lognorms_SC = self._last_SCD.new_empty(0), self._lognorms_SC.new_empty(0)

    @property
    def num_bytes(self) -> int:
        """Memory held, without that of `hidden`."""
        return self._last_SCD.nbytes + self._lognorms_SC.nbytes

    @torch.inference_mode()
    def record(self, states: PathStates) -> None:
        places_T = self._hidden.places(states.rows_T, states.positions_T)
        self._last_SCD.flatten(0, 1).index_copy_(0, places_T, states.last_TD)
        self._lognorms_SC.flatten().index_copy_(0, places_T, states.lognorms_T)

    @torch.inference_mode(False)  # autograd may keep what is trained on
    def finish(self, row: int, rollout: Rollout) -> TrainSequence:
        """What was recorded of the row whose response has just ended; copies, on the CPU."""
        slot, length, first = self._hidden.slot(row), len(rollout.tokens), rollout.prompt_len
        sampled = slice(first - 1, length - 1)
        return TrainSequence(
            key=rollout.key,
            policy_version=rollout.policy_version,
            stream=stream_key(rollout.key),
            first=first,
            tokens_L=rollout.tokens.clone(),
            taps_LE=self._hidden.taps_SCE[slot, : length - 1].to("cpu", copy=True),
            last_PD=self._last_SCD[slot, sampled].to("cpu", copy=True),
            lognorms_P=self._lognorms_SC[slot, sampled].to("cpu", copy=True),
        )
