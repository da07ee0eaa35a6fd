"""The live batch of rounds of fixed shape: its device buffers never move, and the host keeps a copy of the tokens.

    upload: lengths and room of every row, one copy from pinned memory      (before a round, no wait)
    fetch:  emitted tokens and counts of every row, one copy to it          (after a round, the only wait)

Shapes: B rows, C positions of a row, A tokens that a round may emit per row.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from tlt_core.items.speculation import LiveView, MinDraftProbs
from tlt_core.items.static_shapes import Inputs
from tlt_core.items.types import GenerationRequest, SamplingParams
from tlt_core.model.sampling import stream_key
from tlt_core.rollout.batch import Finished, LiveBatch


class RowReport(NamedTuple):
    """What a round says of one row."""

    tokens: list[int]  # emitted; they may go on behind the end of the response
    drafted: int  # draft tokens verified
    offered: int  # depth of the deepest


class StaticBatch(LiveBatch):
    """`LiveBatch` whose rows beyond the live ones are padding (`static_shapes.Inputs`)."""

    def __init__(self, *, max_live: int, max_len: int, device: torch.device, max_emitted: int = 1) -> None:
        """As `LiveBatch`."""
        super().__init__(max_live=max_live, max_len=max_len, device=device, max_emitted=max_emitted)
        pinned = device.type == "cuda"
        self._numbers_2B = torch.ones(2, max_live, dtype=torch.int64, device=device)
        self._numbers_host_2B = torch.ones(2, max_live, dtype=torch.int64, pin_memory=pinned)
        self.lengths_B = self._numbers_2B[0]
        self._log_min_prob = torch.full((), -torch.inf, device=device)
        self._log_min_prob_host = torch.full((), -torch.inf, pin_memory=pinned)
        self._tokens_host_BC = torch.zeros(self.tokens_BC.shape, dtype=torch.int64)
        self._tokens_numpy_BC = self._tokens_host_BC.numpy()  # the same memory: a row is written in a tenth of the time
        self._streams_host_B = torch.zeros(max_live, dtype=torch.int64)
        self.inputs = Inputs(
            self.tokens_BC,
            self.logprobs_BC,
            self.lengths_B,
            self._numbers_2B[1],
            self.streams_B,
            self._log_min_prob,
            max_len,
        )
        # a row: tokens, then how many of them are meant, how many were drafted, depth of the deepest
        self.report_BP = torch.zeros(max_live, max_emitted + 3, dtype=torch.int64, device=device)
        self._report_host_BP = torch.zeros(self.report_BP.shape, dtype=torch.int64, pin_memory=pinned)
        self._copied = torch.cuda.Event() if pinned else None

    def admit(self, request: GenerationRequest, params: SamplingParams) -> int:
        """As `LiveBatch`."""
        row = super().admit(request, params)
        self._tokens_host_BC[row, : len(request.prompt_tokens)] = request.prompt_tokens
        self._streams_host_B[row] = stream_key(request.key)
        return row

    def remove(self, row: int) -> None:
        """As `LiveBatch`."""
        last = len(self) - 1
        super().remove(row)
        if row != last:
            for array in (self._tokens_host_BC, self._streams_host_B):
                array[row] = array[last]

    def view(self, params: SamplingParams) -> LiveView:
        """What drafters on the host may read, in host memory."""
        live = len(self)
        return (
            super().view(params)._replace(tokens_BC=self._tokens_host_BC[:live], streams_B=self._streams_host_B[:live])
        )

    def device_view(self, params: SamplingParams) -> LiveView:
        """The same in the device's memory."""
        return super().view(params)

    def upload(self, min_draft_probs: MinDraftProbs) -> None:
        """Tell the device where each row stands."""
        live = len(self)
        self._numbers_host_2B.fill_(1)
        rooms = [row.limit - length for row, length in zip(self._rows, self.lengths, strict=True)]
        self._numbers_host_2B[:, :live] = torch.tensor([self.lengths, rooms])
        self._numbers_2B.copy_(self._numbers_host_2B, non_blocking=True)
        self._log_min_prob_host.fill_(min_draft_probs.token).log_()  # no least is 0, whose logarithm is -inf
        self._log_min_prob.copy_(self._log_min_prob_host, non_blocking=True)

    def fetch(self) -> list[RowReport]:
        """What the round emitted in the live rows.  Waits for the device: the round's only host sync."""
        live = len(self)
        self._report_host_BP.copy_(self.report_BP, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
            self._copied.synchronize()
        rows = self._report_host_BP[:live].tolist()
        return [RowReport(tokens[:count], drafted, offered) for *tokens, count, drafted, offered in rows]

    def settle(self, emitted: Sequence[Sequence[int]], params: SamplingParams) -> list[Finished]:
        """As `LiveBatch`; the device learns of it in `upload`."""
        for row, tokens in enumerate(emitted):
            start = self.lengths[row]
            self._tokens_numpy_BC[row, start : start + len(tokens)] = tokens
        return super().settle(emitted, params)
