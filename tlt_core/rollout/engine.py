"""The rollout engine: continuous batching of requests over a slot KV cache.

In: a `pull` callable that hands out requests as slots free up.  Out: `on_finish` is called with each Rollout as it
ends.  The engine knows nothing of workers, rewards or training; what happens in its idle time is the owner's affair.

    admit -> prefill (once per distinct prompt, shared by its siblings) -> rounds -> finished rows leave -> admit ...
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tlt_core.model.decoder import Decoder
from tlt_core.model.packed import can_pack, pack_linears
from tlt_core.rollout.batch import LiveBatch
from tlt_core.rollout.kv_cache import SlotCache
from tlt_core.rollout.plain_round import plain_round
from tlt_core.types import GenerationRequest, Rollout, SamplingParams

Pull = Callable[[int], Sequence[GenerationRequest]]
_PREFILL_TOKENS = 4096  # prompt tokens in one forward pass


class RoundTrace(NamedTuple):
    """What one decode round did."""

    live: int  # requests decoded
    tokens: int  # tokens emitted
    end_s: float  # time.time()
    seconds: float


class RolloutEngine:
    """Owns a decoder replica and its KV cache on one device."""

    def __init__(self, decoder: Decoder, *, max_live: int, max_len: int) -> None:
        weight = decoder.head_weight
        self.decoder = decoder
        # Pre-arranged weights take a plain step on CPU from 22 to 12 ms (SmolLM2-135M, bf16); logits stay bitwise.
        self._packed = pack_linears(decoder) if can_pack(decoder) else None
        self.max_live = max_live
        self._cache = SlotCache(
            decoder.config, num_slots=max_live, max_len=max_len, dtype=weight.dtype, device=weight.device
        )
        self._batch = LiveBatch(max_live=max_live, max_len=max_len, device=weight.device)

    def generate(
        self,
        pull: Pull,
        on_finish: Callable[[Rollout], None],
        params: SamplingParams,
        *,
        on_round: Callable[[RoundTrace], None] = lambda _: None,
        policy_version: int = 0,
        worker: int = 0,
    ) -> None:
        """Decode until `pull` has nothing to give and every request has ended.  `pull(n)` returns up to n requests."""
        batch = self._batch
        while True:
            if len(batch) < self.max_live:
                self._admit(pull(self.max_live - len(batch)), params)
            if not len(batch):
                return
            started_s, live = time.perf_counter(), len(batch)
            choice = plain_round(self.decoder, self._cache, batch, params)
            finished = batch.commit(choice, params)
            on_round(RoundTrace(live, live, time.time(), time.perf_counter() - started_s))
            for done in reversed(finished):  # from the last row on, so that moves do not touch rows still to go
                on_finish(batch.rollout(done, policy_version=policy_version, worker=worker))
                self._release(done.row)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Overwrite the replica's weights in place; names and shapes as in `Decoder`."""
        if self._packed is not None:
            self._packed.repack(weights)
        else:
            self.decoder.load_weights(weights)

    def _admit(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> None:
        rows_by_prompt: dict[bytes, list[int]] = {}
        for request in requests:
            row = self._batch.admit(request, params)
            rows_by_prompt.setdefault(request.prompt_tokens.numpy().tobytes(), []).append(row)
        # The last prompt token is left to the first round, which samples from it: siblings share all the rest.
        pending = [rows for rows in rows_by_prompt.values() if self._prefix_len(rows[0])]
        while pending:
            chunk: list[list[int]] = []
            tokens = 0
            while pending and (not chunk or tokens + self._prefix_len(pending[0][0]) <= _PREFILL_TOKENS):
                tokens += self._prefix_len(pending[0][0])
                chunk.append(pending.pop(0))
            self._prefill(chunk)

    def _prefix_len(self, row: int) -> int:
        return len(self._batch.request(row).prompt_tokens) - 1

    @torch.inference_mode()
    def _prefill(self, groups: list[list[int]]) -> None:
        prefixes = [self._batch.request(rows[0]).prompt_tokens[:-1] for rows in groups]
        device = self._batch.lengths_B.device
        offsets_S1 = torch.tensor([0, *(len(p) for p in prefixes)]).cumsum(0)
        positions_T = torch.cat([torch.arange(len(p)) for p in prefixes]).to(device)
        attend = self._cache.prefill_attend([rows[0] for rows in groups], offsets_S1.to(device))
        self.decoder(torch.cat(prefixes).to(device, torch.int64), positions_T, attend)
        for rows, prefix in zip(groups, prefixes, strict=True):
            for sibling in rows[1:]:
                self._cache.move(rows[0], sibling, len(prefix))

    def _release(self, row: int) -> None:
        length = int(self._batch.lengths_B[len(self._batch) - 1])
        moved = self._batch.remove(row)
        if moved != row:
            self._cache.move(moved, row, length)
