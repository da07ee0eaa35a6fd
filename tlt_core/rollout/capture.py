"""Training data of the drafter as a by-product of decoding: what the target computed for each finished response.

    rounds --record--> buffers, a slot a live row --finish--> Captured

Nothing is computed here.  The distribution of the token after position t is softmax(W h_t), and its log-normaliser fell
out of sampling that token; so h_t (after the final norm) and one number a position are enough to restore the
probabilities on any part of the vocabulary later, in somebody's idle time, without the full-vocabulary product:

    log p(v) = W_v h_t - lognorm_t

Shapes: T recorded positions, E tapped width, D hidden size, L tokens of a sequence, P = L - first sampled tokens.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tlt_core.model.config import DecoderConfig
from tlt_core.rollout.batch import RoundResult
from tlt_core.rollout.static_pass import Path
from tlt_core.sampling import stream_key
from tlt_core.types import NoiseKey, Rollout


class Captured(NamedTuple):
    """One finished response as the target saw it."""

    key: NoiseKey
    policy_version: int
    stream: int  # base of its noise, `sampling.stream_key`
    first: int  # prompt tokens
    tokens_L: Tensor  # int32
    taps_LE: Tensor  # [L - 1, E]: the newest token was never run
    last_PD: Tensor  # after the final norm, at positions first - 1 .. L - 2
    lognorms_P: Tensor  # float32, at temperature 1 and without filters, at the same positions


class Capture:
    """Follows the rows of the live batch, as a drafter does (`speculation.Drafter`)."""

    def __init__(
        self,
        config: DecoderConfig,
        *,
        taps: tuple[int, ...],
        max_live: int,
        max_len: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """taps: residual streams to keep, as in `Decoder.forward`."""
        self.taps = taps
        self._max_len, self._size, self._dtype, self._device = max_len, config.hidden_size, dtype, device
        self._take(max_live)
        self._slots = list(range(max_live))  # of each row; moving a row exchanges slots
        self._slots_B = torch.arange(max_live, device=device)

    def acquire(self) -> None:
        """Take the memory."""
        self._take(len(self._slots))

    def release(self) -> None:
        """Give it back; what was recorded of unfinished responses is gone."""
        self._take(0)

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return self._taps_SCE.nbytes + self._last_SCD.nbytes + self._lognorms_SC.nbytes

    def _take(self, slots: int) -> None:
        # Memory is touched, and so taken, only as far as rows really grow.
        shape = (slots, self._max_len)
        self._taps_SCE = torch.zeros(*shape, len(self.taps) * self._size, dtype=self._dtype, device=self._device)
        self._last_SCD = torch.zeros(*shape, self._size, dtype=self._dtype, device=self._device)
        self._lognorms_SC = torch.zeros(*shape, device=self._device)

    @torch.inference_mode()
    def record_prompt(self, rows_T: Tensor, positions_T: Tensor, taps_TE: Tensor) -> None:
        """Positions of prompts, which sample nothing."""
        self._taps_SCE.flatten(0, 1).index_copy_(0, self._places(rows_T, positions_T), taps_TE)

    def share(self, source: int, row: int, length: int) -> None:
        """The first positions of a row are those of another one, with the same prompt."""
        self._taps_SCE[self._slots[row], :length] = self._taps_SCE[self._slots[source], :length]

    @torch.inference_mode()
    def record(self, result: RoundResult | Path) -> None:
        """Positions that a round added to its rows."""
        assert result.taps_TE is not None, "the engine taps what its capture wants"
        places_T = self._places(result.tapped_rows_T, result.tapped_positions_T)
        self._taps_SCE.flatten(0, 1).index_copy_(0, places_T, result.taps_TE)
        self._last_SCD.flatten(0, 1).index_copy_(0, places_T, result.last_TD)
        self._lognorms_SC.flatten().index_copy_(0, places_T, result.lognorms_T)

    @torch.inference_mode()
    def finish(self, row: int, rollout: Rollout) -> Captured:
        """What was recorded of the row whose response has just ended; copies, on the CPU."""
        slot, length, first = self._slots[row], len(rollout.tokens), rollout.prompt_len
        sampled = slice(first - 1, length - 1)
        return Captured(
            key=rollout.key,
            policy_version=rollout.policy_version,
            stream=stream_key(rollout.key),
            first=first,
            tokens_L=rollout.tokens,
            taps_LE=self._taps_SCE[slot, : length - 1].to("cpu", copy=True),
            last_PD=self._last_SCD[slot, sampled].to("cpu", copy=True),
            lognorms_P=self._lognorms_SC[slot, sampled].to("cpu", copy=True),
        )

    def move(self, source: int, target: int) -> None:
        """The request in row `source` is now in row `target`, whose own request has ended."""
        self._slots[source], self._slots[target] = self._slots[target], self._slots[source]
        self._slots_B.copy_(torch.tensor(self._slots))

    def _places(self, rows_T: Tensor, positions_T: Tensor) -> Tensor:
        """Of buffers whose slots lie behind each other: whole rows are copied, which on CPUs takes half the time of
        assigning by two indices."""
        return torch.add(positions_T, self._slots_B[rows_T], alpha=self._max_len)
