"""The live batch: the requests that are being decoded, row by row.

Row i of every array belongs to slot i of the KV cache; rows 0 .. len-1 are live.  When a request ends, the last live
row takes its place.

Shapes: B live rows, C longest sequence, A tokens that a round may emit per row.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tlt_core.items.speculation import LiveView
from tlt_core.items.types import FinishReason, GenerationRequest, Rollout, SamplingParams
from tlt_core.model.sampling import stream_key


class Emitted(NamedTuple):
    """Tokens that a round adds to each live row."""

    tokens_BA: Tensor  # int64
    logprobs_BA: Tensor  # float32, under the sampling policy
    counts_B: Tensor  # int64, how many of the A are meant, at least 1

    def append_to(self, tokens_BC: Tensor, logprobs_BC: Tensor, lengths_B: Tensor) -> None:
        """Write all A behind the known tokens; what lies beyond the count is overwritten by the next round."""
        at_BA = lengths_B[:, None] + torch.arange(self.tokens_BA.shape[1], device=lengths_B.device)
        tokens_BC.scatter_(1, at_BA, self.tokens_BA)
        logprobs_BC.scatter_(1, at_BA, self.logprobs_BA)


class Finished(NamedTuple):
    row: int
    reason: FinishReason


class _Row(NamedTuple):
    request: GenerationRequest
    started_s: float
    limit: int  # length at which it is cut
    number: int  # see `LiveBatch.numbers`


class LiveBatch:
    """Requests in flight.  `lengths` counts the tokens known so far, the newest one not yet in the KV cache."""

    def __init__(self, *, max_live: int, max_len: int, device: torch.device, max_emitted: int = 1) -> None:
        """max_emitted: the largest A of `commit`."""
        self._rows: list[_Row] = []
        self._max_len = max_len
        width = max_len + max_emitted
        self.tokens_BC = torch.zeros(max_live, width, dtype=torch.int64, device=device)
        self.logprobs_BC = torch.zeros(max_live, width, device=device)
        self.lengths_B = torch.zeros(max_live, dtype=torch.int64, device=device)
        self.lengths: list[int] = []  # the same on the host
        self.streams_B = torch.zeros(max_live, dtype=torch.int64, device=device)
        self.longest = 0  # upper bound of the live lengths, known without asking the device
        self._admitted = 0

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def numbers(self) -> tuple[int, ...]:
        """A number for each row's request, which the request keeps for life."""
        return tuple(row.number for row in self._rows)

    def request(self, row: int) -> GenerationRequest:
        return self._rows[row].request

    def admit(self, request: GenerationRequest, params: SamplingParams) -> int:
        """Give a request the next row; returns the row.  Raises ValueError when its prompt does not fit."""
        row, length = len(self._rows), len(request.prompt_tokens)
        if length >= self._max_len:
            raise ValueError(
                f"prompt {request.key.prompt_id} has {length} tokens, which leaves no room for a response in "
                f"{self._max_len} positions; shorten it or raise rollout.max_prompt_tokens"
            )
        most = params.max_new_tokens if request.max_new_tokens is None else request.max_new_tokens
        limit = length + min(most, params.max_new_tokens)
        self._rows.append(_Row(request, time.time(), min(limit, self._max_len), self._admitted))
        self._admitted += 1
        self.lengths.append(length)
        self.tokens_BC[row, :length] = request.prompt_tokens.to(self.tokens_BC)
        self.lengths_B[row] = length
        self.streams_B[row] = stream_key(request.key)
        self.longest = max(self.longest, length)
        return row

    def newest(self) -> tuple[Tensor, Tensor]:
        """The newest token of every live row and its position, [B] int64 each."""
        positions_B = self.lengths_B[: len(self)] - 1
        return self.tokens_BC[: len(self)].gather(1, positions_B[:, None]).squeeze(1), positions_B

    def view(self, params: SamplingParams) -> LiveView:
        """What drafters may read."""
        return LiveView(
            requests=[row.request for row in self._rows],
            tokens_BC=self.tokens_BC[: len(self)],
            lengths=self.lengths,
            room=[row.limit - length for row, length in zip(self._rows, self.lengths, strict=True)],
            streams_B=self.streams_B[: len(self)],
            params=params,
        )

    def commit(self, emitted: Emitted, params: SamplingParams) -> list[Finished]:
        """Append a round's tokens, each row's up to the end of its response; returns the rows that are done."""
        live = len(self)
        emitted.append_to(self.tokens_BC[:live], self.logprobs_BC[:live], self.lengths_B[:live])
        both = torch.cat([emitted.tokens_BA, emitted.counts_B[:, None]], dim=1).tolist()  # the round's only host sync
        before = self.lengths
        finished = self.settle([tokens[:count] for *tokens, count in both], params)
        kept = [now - then for now, then in zip(self.lengths, before, strict=True)]
        self.lengths_B[:live] += torch.tensor(kept).to(self.lengths_B)
        return finished

    def settle(self, emitted: Sequence[Sequence[int]], params: SamplingParams) -> list[Finished]:
        """Add these tokens of each row to the lengths on the host; returns the rows that are done."""
        stops = set(params.stop_token_ids)
        kept, finished = [], []
        for row, tokens in enumerate(emitted):
            room = self._rows[row].limit - self.lengths[row]
            tokens = tokens[:room]
            stop = next((i for i, token in enumerate(tokens) if token in stops), None)
            if stop is not None:
                tokens = tokens[: stop + 1]
                finished.append(Finished(row, FinishReason.STOP))
            elif len(tokens) == room:
                finished.append(Finished(row, FinishReason.LENGTH))
            kept.append(len(tokens))
        self.lengths = [length + count for length, count in zip(self.lengths, kept, strict=True)]
        self.longest = max(self.lengths)
        return finished

    def rollout(self, done: Finished, *, policy_version: int, worker: int) -> Rollout:
        """The finished row as an item of the pipeline."""
        row, length = self._rows[done.row], self.lengths[done.row]
        prompt_len = len(row.request.prompt_tokens)
        return Rollout(
            key=row.request.key,
            tokens=self.tokens_BC[done.row, :length].to("cpu", torch.int32),
            prompt_len=prompt_len,
            logprobs=self.logprobs_BC[done.row, prompt_len:length].to("cpu", copy=True),
            finish=done.reason,
            policy_version=policy_version,
            worker=worker,
            started_s=row.started_s,
            finished_s=time.time(),
        )

    def remove(self, row: int) -> None:
        """Free a row: the last one takes its place."""
        last = len(self._rows) - 1
        if row != last:
            for array in (self.tokens_BC, self.logprobs_BC, self.lengths_B, self.streams_B):
                array[row] = array[last]
            self._rows[row], self.lengths[row] = self._rows[last], self.lengths[last]
        self._rows.pop()
        self.lengths.pop()
        if not self._rows:
            self.longest = 0  # a larger bound would change the last bits of the next phase's attention
