"""Hidden states of the live requests: one buffer, written by the engine, lent to drafters and to the capture.

Shapes: S slots, B rows, C positions, T tokens, E tapped width, D hidden size.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class PathStates(NamedTuple):
    """What the target computed for the tokens that a round added to its rows, flat, row by row.

    In a round that may emit A tokens a row, every row has A entries.  A row that emitted fewer repeats its last entry:
    writing it twice writes the same.
    """

    rows_T: Tensor  # int64
    positions_T: Tensor  # int64, of the token that the state belongs to; the token after it was sampled there
    taps_TE: Tensor  # residual streams that enter the tapped layers, side by side
    last_TD: Tensor  # after the final norm
    lognorms_T: Tensor  # float32, see `sampling.lognorms`


class HiddenStates:
    """The tapped hidden states of up to `max_live` requests of up to `max_len` positions."""

    def __init__(
        self,
        taps: tuple[int, ...],
        *,
        hidden_size: int,
        max_live: int,
        max_len: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """taps: residual streams to keep, as in `Decoder.forward`; none: the buffer is empty and stays so."""
        self.taps = taps
        self._slots = list(range(max_live))  # of each row
        self.slots_B = torch.arange(max_live, device=device)  # the same on the device
        self._shape, self._dtype = (max_live, max_len, len(taps) * hidden_size), dtype
        self.acquire()

    def acquire(self) -> None:
        self.taps_SCE = torch.zeros(self._shape, dtype=self._dtype, device=self.slots_B.device)

    def release(self) -> None:
        """Give the memory back; what was recorded of unfinished responses is gone."""
        self.taps_SCE = self.taps_SCE.new_empty(0)

    @property
    def num_bytes(self) -> int:
        return self.taps_SCE.nbytes

    def slot(self, row: int) -> int:
        return self._slots[row]

    def places(self, rows_T: Tensor, positions_T: Tensor) -> Tensor:
        """Index of each position in the buffer without its slot axis, [S C, E].  Copying by one index takes half the
        time of copying by two on a CPU."""
        return torch.add(positions_T, self.slots_B[rows_T], alpha=self._shape[1])

    @torch.inference_mode()
    def record(self, rows_T: Tensor, positions_T: Tensor, taps_TE: Tensor) -> None:
        """Keep the states of known tokens, in any order."""
        self.taps_SCE.flatten(0, 1).index_copy_(0, self.places(rows_T, positions_T), taps_TE)

    @torch.inference_mode()
    def record_prompt(self, row: int, taps_TE: Tensor, *, start: int = 0) -> None:
        """Keep the states of T tokens of a row's prompt, from position `start` on."""
        self.taps_SCE[self._slots[row], start : start + len(taps_TE)] = taps_TE

    def read(self, rows_T: Tensor, positions_T: Tensor) -> Tensor:
        """The states of these tokens, [T, E]."""
        return self.taps_SCE[self.slots_B[rows_T], positions_T]

    @torch.inference_mode()
    def share(self, source: int, row: int, length: int) -> None:
        """The first `length` tokens of `row` are those of `source`, and so are their states."""
        self.taps_SCE[self._slots[row], :length] = self.taps_SCE[self._slots[source], :length]

    @torch.inference_mode()
    def move(self, source: int, target: int) -> None:
        """The request in row `source` is now in row `target`, whose own request has ended."""
        self._slots[source], self._slots[target] = self._slots[target], self._slots[source]
        self.slots_B.copy_(torch.tensor(self._slots))
