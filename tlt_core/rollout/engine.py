"""The rollout engine: continuous batching of requests over a slot KV cache.

In: a `pull` callable that hands out requests as slots free up.  Out: `on_finish` is called with each Rollout as it
ends.  The engine knows nothing of workers, rewards or training; the caller decides what to run in idle time.

    admit -> prefill (once per distinct prompt, shared by its siblings) -> rounds -> finished rows leave -> admit ...

A round is plain, or speculative: the tuner names a strategy, its drafter proposes, `spec_round` verifies.  Both sample
the same tokens.  On a GPU rounds have fixed shapes and are replayed graphs (`static_rounds`).
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from tlt_core.items.hidden_states import HiddenStates, PathStates
from tlt_core.items.speculation import NO_MIN_DRAFT_PROBS, OFF, Drafter, DraftTree, RoundReport, Strategy, Tuner
from tlt_core.items.train_sequence import TrainSequence
from tlt_core.items.types import GenerationRequest, NoiseKey, Rollout, SamplingParams
from tlt_core.machine.huge_pages import use_huge_pages
from tlt_core.model.decoder import Decoder
from tlt_core.model.packed import can_pack, pack_linears
from tlt_core.rollout.batch import Finished, LiveBatch
from tlt_core.rollout.capture import Capture
from tlt_core.rollout.draft_check import GuardedDrafting
from tlt_core.rollout.graphs import EagerPool, GraphPool
from tlt_core.rollout.kv_cache import SlotCache
from tlt_core.rollout.kv_memory import check_on_device
from tlt_core.rollout.prefill import Prefill
from tlt_core.rollout.rounds import Rounds
from tlt_core.rollout.static_batch import StaticBatch
from tlt_core.rollout.static_rounds import StaticRounds, widest

Pull = Callable[[int], Sequence[GenerationRequest]]


class RoundTrace(NamedTuple):
    report: RoundReport
    numbers: tuple[int, ...]  # of the requests: a request keeps its number for life
    tokens: int  # tokens emitted
    end_s: float  # time.time()
    seconds: float


class Speculation(NamedTuple):
    drafters: Mapping[str, Drafter]  # by name
    tuner: Tuner
    strategies: Sequence[Strategy]  # what the tuner may choose from: fixes the room that drafts need


class RolloutEngine:
    """Owns a decoder replica, and the cache and hidden states of its requests, on one device."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        max_live: int,
        max_len: int,
        speculation: Speculation | None = None,
        capture_taps: tuple[int, ...] = (),
        static: bool | None = None,
        kv_memory_fraction: float = 0.9,
    ) -> None:
        """speculation: None for plain decoding.  capture_taps: hidden states that `decode` can hand out with each
        finished response.  static: rounds of fixed shape, on a GPU as graphs; None: on a GPU.  kv_memory_fraction: of a
        GPU's free memory, for the KV cache.  Raises ValueError when that is too little, and when drafters and capture
        want different hidden states."""
        config, weight = decoder.config, decoder.head_weight
        dtype, device = weight.dtype, weight.device
        static = weight.is_cuda if static is None else static
        self.decoder, self.max_live, self.speculation = decoder, max_live, speculation
        # Pre-arranged weights make a step on a CPU faster; logits stay the same to the bit.
        self._packed = pack_linears(decoder) if can_pack(decoder) else None
        strategies: Sequence[Strategy] = () if speculation is None else speculation.strategies
        drafters: Mapping[str, Drafter] = {} if speculation is None else speculation.drafters
        depth = max((s.depth for s in strategies), default=0)
        drafted = widest(strategies) - 1 if static else max((s.tokens for s in strategies), default=0)
        check_on_device(
            config,
            device,
            max_live=max_live,
            positions=max_len + drafted,
            dtype=dtype,
            fraction=kv_memory_fraction,
        )
        self._cache = SlotCache(
            config, num_slots=max_live, max_len=max_len, dtype=dtype, device=device, max_draft_tokens=drafted
        )
        self._hidden = HiddenStates(
            _common_taps(drafters.values(), capture_taps),
            hidden_size=config.hidden_size,
            max_live=max_live,
            max_len=max_len + depth,  # drafts of fixed shape read behind a row's end, and do not use it
            dtype=dtype,
            device=device,
        )
        self._capture = Capture(self._hidden, size=config.hidden_size) if capture_taps else None
        self._is_static = static
        self._is_capturing = False  # somebody wants the capture of the requests that are live
        for drafter in drafters.values():
            if drafter.taps:
                drafter.borrow(self._hidden)
        self._drafting = GuardedDrafting(drafters, vocab_size=config.vocab_size)
        kind = StaticBatch if static else LiveBatch
        self._batch = kind(max_live=max_live, max_len=max_len, device=device, max_emitted=1 + depth)
        self._prefill = Prefill(decoder, self._cache, self._batch, self._hidden)
        self._rounds = self._make_rounds(strategies)
        if self._packed is not None:
            use_huge_pages()  # for the weights, and for keys and values, whose memory is reserved by now

    def decode(
        self,
        pull: Pull,
        on_finish: Callable[[Rollout], None],
        params: SamplingParams,
        *,
        on_round: Callable[[RoundTrace], None] = lambda _: None,
        on_captured: Callable[[TrainSequence], None] | None = None,
        policy_version: int = 0,
        worker: int = 0,
    ) -> None:
        """Decode until `pull` has nothing to give and every request has ended.  `pull(n)` returns up to n requests.

        on_captured: gets the hidden states of each response that ends; only where `capture_taps` were given.
        """
        batch = self._batch
        self._is_capturing = on_captured is not None and self._capture is not None
        self.prepare(params)
        while True:
            if len(batch) < self.max_live:
                self._admit(pull(self.max_live - len(batch)), params)
            if not len(batch):
                return
            finished = self._round(params, on_round)
            for done in reversed(finished):  # from the last row on, so that moves do not touch rows still to go
                if batch.request(done.row).may_continue and not self._is_static:
                    self._prefill.keep(done.row, most=self.max_live)
                rollout = batch.rollout(done, policy_version=policy_version, worker=worker)
                if on_captured is not None and self._capture is not None:
                    on_captured(self._capture.finish(done.row, rollout))
                self._release(done.row, rollout.tokens)
                on_finish(rollout)

    def decode_all(
        self,
        requests: Iterable[GenerationRequest],
        params: SamplingParams,
        *,
        on_finish: Callable[[Rollout], None] = lambda _: None,
        on_round: Callable[[RoundTrace], None] = lambda _: None,
    ) -> list[Rollout]:
        """Decode these requests, the first ones first; the rollouts in the order of their keys."""
        waiting, finished = iter(requests), []

        def keep(rollout: Rollout) -> None:
            finished.append(rollout)
            on_finish(rollout)

        self.decode(lambda wanted: list(islice(waiting, wanted)), keep, params, on_round=on_round)
        return sorted(finished, key=lambda r: r.key)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Overwrite the replica's weights in place; names and shapes as in `Decoder`."""
        self._prefill.forget()
        if self._packed is not None:
            if self._packed.repack(weights):
                use_huge_pages()
        else:
            self.decoder.load_weights(weights)

    def forget_turns(self) -> None:
        """No request that is to come continues one that has ended."""
        self._prefill.forget()

    def prepare(self, params: SamplingParams) -> None:
        """Take memory and capture graphs that `decode` would otherwise begin with; no request may be live."""
        if self.memory_bytes == 0:
            for part in self._request_memory:
                part.acquire()
        self._rounds.prepare(params)

    def release_graphs(self) -> None:
        """Give back the memory of captured graphs; the next `decode` captures them again.  Call it
        before moving the decoder's weights to other memory."""
        self._rounds.release()

    @property
    def graphs(self) -> EagerPool | GraphPool | None:
        """The pool of captured rounds; None where rounds have no fixed shapes."""
        return self._rounds.pool

    @property
    def memory_bytes(self) -> int:
        """Held for live requests: keys, values, recorded hidden states."""
        return sum(part.num_bytes for part in self._request_memory)

    def release_memory(self) -> None:
        """Give that memory back until the next `decode`, and the graphs, which hold its addresses.  Raises ValueError
        while requests are live."""
        if len(self._batch):
            raise ValueError(f"{len(self._batch)} requests are live: their memory can be released when they have ended")
        self._prefill.forget()
        self.release_graphs()
        for part in self._request_memory:
            part.release()
        if self._cache.keys_YSKCd.is_cuda:
            torch.cuda.empty_cache()  # unfragmented, for the next user

    @property
    def drafter_failures(self) -> Mapping[tuple[str, str], int]:
        """Proposals that could not be used, by (drafter, kind of failure)."""
        return self._drafting.failures

    def rehearse(self, live: int, tokens: int, context: int) -> float:
        """Time a round without requests: `live` rows of `context` tokens verify `tokens` in all (as many as rows: a
        plain round).  Returns the seconds of its pass.  Raises ValueError while requests are live."""
        if len(self._batch):
            raise ValueError("the engine is decoding: rehearse before the first request")
        params = SamplingParams()
        self.prepare(params)
        prompt = torch.zeros(max(1, min(context, self._cache.max_len - 1)), dtype=torch.int32)
        for sample in range(live):
            self._batch.admit(GenerationRequest(NoiseKey(0, 0, 0, sample), prompt), params)
        seconds = self._rounds.rehearse(_chains(live, tokens - live), params)
        for row in reversed(range(live)):
            self._batch.remove(row)
        return seconds

    def _make_rounds(self, strategies: Sequence[Strategy]) -> Rounds | StaticRounds:
        """Of fixed shape, if the live batch is."""
        decoder, cache, batch, taps = self.decoder, self._cache, self._batch, self._hidden.taps
        drafting, record = self._drafting, self._record
        if isinstance(batch, StaticBatch):
            return StaticRounds(
                decoder, cache, batch, drafting=drafting, strategies=strategies, taps=taps, record=record
            )
        return Rounds(decoder, cache, batch, drafting=drafting, taps=taps, record=record)

    def _round(self, params: SamplingParams, on_round: Callable[[RoundTrace], None]) -> list[Finished]:
        """One round of the live batch: choose, draft, verify, commit, learn."""
        batch, started_s = self._batch, time.perf_counter()
        speculation = None if params.plain else self.speculation
        context, numbers = sum(batch.lengths), batch.numbers
        strategy, min_draft_probs = OFF, NO_MIN_DRAFT_PROBS
        if speculation is not None:
            strategy = speculation.tuner.choose(numbers, context)
            min_draft_probs = speculation.tuner.min_draft_probs
        finished, report = self._rounds.run(strategy, min_draft_probs, params)
        end_s = time.perf_counter()
        if speculation is not None:
            speculation.tuner.observe(numbers, report)
        on_round(RoundTrace(report, numbers, sum(batch.lengths) - context, time.time(), end_s - started_s))
        return finished

    def _record(self, states: PathStates) -> None:
        self._hidden.record(states.rows_T, states.positions_T, states.taps_TE)
        if self._is_capturing and self._capture is not None:
            self._capture.record(states)

    def _admit(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> None:
        first = len(self._batch)
        for request in requests:
            row = self._batch.admit(request, params)
            for drafter in self._drafting.drafters.values():
                drafter.admit(row, request)
        self._prefill.run(first)

    def _release(self, row: int, tokens: Tensor) -> None:
        last = len(self._batch) - 1
        length, number = self._batch.lengths[last], self._batch.numbers[row]
        self._batch.remove(row)
        if self.speculation is not None:
            self.speculation.tuner.forget(number)
        drafters = self._drafting.drafters.values()
        for drafter in drafters:
            drafter.release(row, tokens)
        if last == row:
            return
        self._cache.move(last, row, length)
        self._hidden.move(last, row)
        for drafter in drafters:
            drafter.move(last, row)

    @property
    def _request_memory(self) -> Sequence[SlotCache | HiddenStates | Capture]:
        own = (self._cache, self._hidden)
        return own if self._capture is None else (*own, self._capture)


def _chains(live: int, drafted: int) -> DraftTree:
    """`drafted` tokens, shared evenly among the chains of `live` rows."""
    share, more = divmod(drafted, live)
    chain = [(row, depth) for row in range(live) for depth in range(1, share + (row < more) + 1)]
    return DraftTree.of_lists(
        [0] * len(chain),
        [-1 if depth == 1 else index - 1 for index, (_, depth) in enumerate(chain)],
        [row for row, _ in chain],
        [depth for _, depth in chain],
    )


def _common_taps(drafters: Iterable[Drafter], captured: tuple[int, ...]) -> tuple[int, ...]:
    wanted = {taps for taps in (captured, *(drafter.taps for drafter in drafters)) if taps}
    if len(wanted) > 1:
        raise ValueError(f"different hidden states are wanted ({sorted(wanted)}): use drafters of one kind")
    return next(iter(wanted), ())
