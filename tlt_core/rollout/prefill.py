"""Prompts of new requests: each distinct prompt runs once, and all requests with that prompt share the result.

    admitted rows -> prompt known from a live row?  copy its keys, values and hidden states
                     begins with a turn that has ended here?  put that back, one pass over what is new
                     otherwise one packed pass over the new prompts, then copies for siblings

The last prompt token is left to the first round, which samples from it.

Shapes: S prompts of a pass, T tokens of all of them; Y, K, C, d, E as in `kv_cache` and `hidden_states`.
"""

from collections import OrderedDict
from typing import NamedTuple

import torch
from torch import Tensor

from tlt_core.items.hidden_states import HiddenStates
from tlt_core.items.types import NoiseKey
from tlt_core.model.decoder import Decoder
from tlt_core.rollout.batch import LiveBatch
from tlt_core.rollout.kv_cache import SlotCache

_PASS_TOKENS = 4096  # prompt tokens in one forward pass


class _Turn(NamedTuple):
    """What a row held when its turn ended: all but its newest token."""

    tokens_C: Tensor
    keys_YKCd: Tensor
    values_YKCd: Tensor
    taps_CE: Tensor


class Prefill:
    """Fills the cache and the hidden states of rows that were just admitted."""

    def __init__(self, decoder: Decoder, cache: SlotCache, batch: LiveBatch, hidden: HiddenStates) -> None:
        self._decoder, self._cache, self._batch, self._hidden = decoder, cache, batch, hidden
        self._turns: OrderedDict[NoiseKey, _Turn] = OrderedDict()  # that may go on, the oldest first

    def keep(self, row: int, *, most: int) -> None:
        """A row's turn has ended and another may follow: remember its state.  most: turns remembered at once."""
        length = self._batch.lengths[row] - 1
        self._turns[self._batch.request(row).key] = _Turn(
            self._batch.tokens_BC[row, :length].to(torch.int32),
            self._cache.keys_YSKCd[:, row, :, :length].clone(),
            self._cache.values_YSKCd[:, row, :, :length].clone(),
            self._hidden.taps_SCE[self._hidden.slot(row), :length].clone(),
        )
        while len(self._turns) > most:
            self._turns.popitem(last=False)

    def forget(self) -> None:
        """The weights have changed, or the phase has ended."""
        self._turns.clear()

    @torch.inference_mode()
    def run(self, first: int) -> None:
        known = {self._prompt(row): row for row in range(first)}
        new: dict[bytes | int, list[int]] = {}
        starts: dict[int, int] = {}  # of rows whose first tokens are known: how many
        for row in range(first, len(self._batch)):
            prompt = self._prompt(row)
            if length := self._put_back(row):
                starts[row] = length
                new[row] = [row]
            elif prompt in known:
                self._share(known[prompt], row)
            elif self._prefix_len(row):
                new.setdefault(prompt, []).append(row)
        pending = list(new.values())
        while pending:
            chunk, tokens = list[list[int]](), 0
            while pending and (not chunk or tokens + self._prefix_len(pending[0][0]) <= _PASS_TOKENS):
                tokens += self._prefix_len(pending[0][0]) - starts.get(pending[0][0], 0)
                chunk.append(pending.pop(0))
            self._pass(chunk, [starts.get(rows[0], 0) for rows in chunk])

    def _put_back(self, row: int) -> int:
        """Restore the row's turn before; returns its tokens.  0: it is not here."""
        request = self._batch.request(row)
        turn = self._turns.pop(request.key, None)
        if turn is None or not torch.equal(turn.tokens_C, request.prompt_tokens[: len(turn.tokens_C)]):
            return 0
        length = len(turn.tokens_C)
        self._cache.keys_YSKCd[:, row, :, :length] = turn.keys_YKCd
        self._cache.values_YSKCd[:, row, :, :length] = turn.values_YKCd
        if self._hidden.taps:
            self._hidden.record_prompt(row, turn.taps_CE)
        return length

    def _pass(self, groups: list[list[int]], starts: list[int]) -> None:
        """One forward pass.  groups: the rows of each prompt.  starts: how many of its tokens are known."""
        prefixes = [
            self._batch.request(rows[0]).prompt_tokens[start:-1] for rows, start in zip(groups, starts, strict=True)
        ]
        device = self._batch.lengths_B.device
        offsets_S1 = torch.tensor([0, *(len(p) for p in prefixes)]).cumsum(0)
        bounds = offsets_S1.tolist()
        positions_T = torch.cat([torch.arange(len(p)) + start for p, start in zip(prefixes, starts, strict=True)])
        positions_T = positions_T.to(device)
        attend = self._cache.prefill_attend([rows[0] for rows in groups], offsets_S1, starts)
        tokens_T = torch.cat(prefixes).to(device, torch.int64)
        hidden = self._decoder(tokens_T, positions_T, attend, taps=self._hidden.taps)
        for index, (first, *siblings) in enumerate(groups):
            if hidden.taps_TE is not None:
                taps_TE = hidden.taps_TE[bounds[index] : bounds[index + 1]]
                self._hidden.record_prompt(first, taps_TE, start=starts[index])
            for row in siblings:
                self._share(first, row)

    def _share(self, source: int, row: int) -> None:
        """A row with the same prompt has computed it already."""
        length = self._prefix_len(row)
        self._cache.move(source, row, length)
        if self._hidden.taps:
            self._hidden.share(source, row, length)

    def _prompt(self, row: int) -> bytes:
        return self._batch.request(row).prompt_tokens.numpy().tobytes()

    def _prefix_len(self, row: int) -> int:
        return len(self._batch.request(row).prompt_tokens) - 1
