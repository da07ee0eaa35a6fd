"""Prompts of new requests: each distinct prompt runs once, and all requests with that prompt share the result.

    admitted rows -> prompt known from a live row?  copy its keys, values and hidden states
                     otherwise one packed pass over the new prompts, then copies for siblings

The last prompt token is left to the first round, which samples from it.

Shapes: S prompts of a pass, T tokens of all of them.
"""

import torch

from tlt_core.items.hidden_states import HiddenStates
from tlt_core.model.decoder import Decoder
from tlt_core.rollout.batch import LiveBatch
from tlt_core.rollout.kv_cache import SlotCache

_PASS_TOKENS = 4096  # prompt tokens in one forward pass


class Prefill:
    """Fills the cache and the hidden states of rows that were just admitted."""

    def __init__(self, decoder: Decoder, cache: SlotCache, batch: LiveBatch, hidden: HiddenStates) -> None:
        self._decoder, self._cache, self._batch, self._hidden = decoder, cache, batch, hidden

    @torch.inference_mode()
    def run(self, first: int) -> None:
        known = {self._prompt(row): row for row in range(first)}
        new: dict[bytes, list[int]] = {}
        for row in range(first, len(self._batch)):
            prompt = self._prompt(row)
            if prompt in known:
                self._share(known[prompt], row)
            elif self._prefix_len(row):
                new.setdefault(prompt, []).append(row)
        pending = list(new.values())
        while pending:
            chunk = [pending.pop(0)]
            tokens = self._prefix_len(chunk[0][0])
            while pending and tokens + self._prefix_len(pending[0][0]) <= _PASS_TOKENS:
                tokens += self._prefix_len(pending[0][0])
                chunk.append(pending.pop(0))
            self._pass(chunk)

    def _pass(self, groups: list[list[int]]) -> None:
        """One forward pass.  groups: the rows of each prompt."""
        prefixes = [self._batch.request(rows[0]).prompt_tokens[:-1] for rows in groups]
        device = self._batch.lengths_B.device
        offsets_S1 = torch.tensor([0, *(len(p) for p in prefixes)]).cumsum(0)
        starts = offsets_S1.tolist()
        positions_T = torch.cat([torch.arange(len(p)) for p in prefixes]).to(device)
        attend = self._cache.prefill_attend([rows[0] for rows in groups], offsets_S1)
        tokens_T = torch.cat(prefixes).to(device, torch.int64)
        hidden = self._decoder(tokens_T, positions_T, attend, taps=self._hidden.taps)
        for index, (first, *siblings) in enumerate(groups):
            if hidden.taps_TE is not None:
                self._hidden.record_prompt(first, hidden.taps_TE[starts[index] : starts[index + 1]])
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
