"""The rollout engine: continuous batching of requests over a slot KV cache.

In: a `pull` callable that hands out requests as slots free up.  Out: `on_finish` is called with each Rollout as it
ends.  The engine knows nothing of workers, rewards or training; what happens in its idle time is the owner's affair.

    admit -> prefill (once per distinct prompt, shared by its siblings) -> rounds -> finished rows leave -> admit ...

A round is plain, or speculative: the tuner names a strategy, its drafter proposes, `spec_round` verifies.  What is
sampled is the same in either case.  On a GPU rounds have fixed shapes and are replayed graphs (`static_rounds`).
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from tlt_core.model.decoder import Decoder
from tlt_core.model.huge_pages import use_huge_pages
from tlt_core.model.packed import can_pack, pack_linears
from tlt_core.rollout.batch import Emitted, Finished, LiveBatch, RoundResult
from tlt_core.rollout.capture import Capture, Captured
from tlt_core.rollout.draft_check import GuardedDrafting
from tlt_core.rollout.graphs import EagerPool, GraphPool
from tlt_core.rollout.kv_cache import SlotCache
from tlt_core.rollout.kv_memory import check_on_device
from tlt_core.rollout.plain_round import plain_round
from tlt_core.rollout.spec_round import spec_round
from tlt_core.rollout.static_batch import StaticBatch
from tlt_core.rollout.static_pass import Path
from tlt_core.rollout.static_rounds import Outcome, StaticRounds, widest
from tlt_core.speculation import NO_FLOORS, OFF, Drafter, DraftTree, LiveView, RoundReport, Strategy, Tuner
from tlt_core.types import GenerationRequest, NoiseKey, Rollout, SamplingParams

Pull = Callable[[int], Sequence[GenerationRequest]]
_PREFILL_TOKENS = 4096  # prompt tokens in one forward pass


class RoundTrace(NamedTuple):
    """What one decode round did."""

    report: RoundReport
    numbers: tuple[int, ...]  # of the requests: a number is a request's for its life
    tokens: int  # tokens emitted
    end_s: float  # time.time()
    seconds: float


class Speculation(NamedTuple):
    """What an engine speculates with."""

    drafters: Mapping[str, Drafter]  # by name
    tuner: Tuner
    menu: Sequence[Strategy]  # what the tuner may choose from: fixes the room that drafts need


class RolloutEngine:
    """Owns a decoder replica and its KV cache on one device."""

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
        """speculation: None for plain decoding.  capture_taps: hidden states that `generate` can hand out with each
        finished response.  static: rounds of fixed shape, on a GPU as graphs; None: on a GPU.  kv_memory_fraction: of a
        GPU's free memory, for the KV cache.  Raises ValueError when that is too little, and when two of those who want
        hidden states want different ones."""
        weight = decoder.head_weight
        static = weight.is_cuda if static is None else static
        self.decoder = decoder
        # Pre-arranged weights take a plain step on CPU from 22 to 12 ms (SmolLM2-135M, bf16); logits stay bitwise.
        self._packed = pack_linears(decoder) if can_pack(decoder) else None
        self.max_live = max_live
        self.speculation = speculation
        menu = () if speculation is None else speculation.menu
        self._drafters = () if speculation is None else tuple(speculation.drafters.values())
        self._taps = _common_taps(self._drafters, capture_taps)
        self._capture = (
            Capture(
                decoder.config,
                taps=capture_taps,
                max_live=max_live,
                max_len=max_len,
                dtype=weight.dtype,
                device=weight.device,
            )
            if capture_taps
            else None
        )
        self._guard = GuardedDrafting(decoder.config.vocab_size)
        drafted = widest(menu) - 1 if static else max((s.tokens for s in menu), default=0)
        check_on_device(
            decoder.config,
            weight.device,
            max_live=max_live,
            positions=max_len + drafted,
            dtype=weight.dtype,
            fraction=kv_memory_fraction,
        )
        self._cache = SlotCache(
            decoder.config,
            num_slots=max_live,
            max_len=max_len,
            dtype=weight.dtype,
            device=weight.device,
            max_draft_tokens=drafted,
        )
        emitted = 1 + max((s.depth for s in menu), default=0)
        kind = StaticBatch if static else LiveBatch
        self._batch = kind(max_live=max_live, max_len=max_len, device=weight.device, max_emitted=emitted)
        self._static: StaticRounds | None = None
        if isinstance(self._batch, StaticBatch):
            drafters = {} if speculation is None else speculation.drafters
            parts = (decoder, self._cache, self._batch)
            self._static = StaticRounds(*parts, drafters=drafters, menu=menu, taps=self._taps, record=self._record_path)
        self._recording: Capture | None = None  # the capture, while somebody wants what it keeps
        self._requests_seen = 0
        self._numbers: list[int] = []  # of the live rows, see `RoundTrace`
        if self._packed is not None:
            use_huge_pages()  # for the weights, and for keys and values, whose memory is reserved by now

    def generate(
        self,
        pull: Pull,
        on_finish: Callable[[Rollout], None],
        params: SamplingParams,
        *,
        on_round: Callable[[RoundTrace], None] = lambda _: None,
        on_captured: Callable[[Captured], None] | None = None,
        policy_version: int = 0,
        worker: int = 0,
    ) -> None:
        """Decode until `pull` has nothing to give and every request has ended.  `pull(n)` returns up to n requests.

        on_captured: gets the hidden states of each response that ends; only where `capture_taps` were given.
        """
        batch = self._batch
        self._recording = None if on_captured is None else self._capture
        self.prepare(params)
        while True:
            if len(batch) < self.max_live:
                self._admit(pull(self.max_live - len(batch)), params)
            if not len(batch):
                return
            finished = self._round(params, on_round)
            for done in reversed(finished):  # from the last row on, so that moves do not touch rows still to go
                rollout = batch.rollout(done, policy_version=policy_version, worker=worker)
                if on_captured is not None and self._recording is not None:
                    on_captured(self._recording.finish(done.row, rollout))
                self._release(done.row, rollout.tokens)
                on_finish(rollout)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Overwrite the replica's weights in place; names and shapes as in `Decoder`."""
        if self._packed is not None:
            if self._packed.repack(weights):
                use_huge_pages()
        else:
            self.decoder.load_weights(weights)

    def prepare(self, params: SamplingParams) -> None:
        """Take memory and capture graphs that `generate` would otherwise begin with; no request may be live."""
        self._acquire_memory()
        if self._static is not None:
            self._static.prepare(params)

    def release_graphs(self) -> None:
        """Give captured graphs' memory back, if there are any; the next `generate` captures them again.  To be called,
        too, by whoever moves the decoder's weights to other memory."""
        if self._static is not None:
            self._static.release()

    @property
    def graphs(self) -> EagerPool | GraphPool | None:
        """The pool of captured rounds; None where rounds have no fixed shapes."""
        return None if self._static is None else self._static.pool

    @property
    def memory_bytes(self) -> int:
        """Held for live requests: keys, values, recorded hidden states."""
        return sum(part.num_bytes for part in self._request_memory)

    def release_memory(self) -> None:
        """Give that memory back until the next `generate`, and that of graphs, which hold its addresses.  Raises
        ValueError while requests are live."""
        if len(self._batch):
            raise ValueError(f"{len(self._batch)} requests are live: their memory can be released when they have ended")
        self.release_graphs()
        for part in self._request_memory:
            part.release()
        if self._cache.keys_YSKCd.is_cuda:
            torch.cuda.empty_cache()  # in one piece, for whoever is next

    @property
    def _request_memory(self) -> tuple[SlotCache | Capture, ...]:
        return (self._cache,) if self._capture is None else (self._cache, self._capture)

    def _acquire_memory(self) -> None:
        if self.memory_bytes == 0:
            for part in self._request_memory:
                part.acquire()

    @property
    def drafter_failures(self) -> Mapping[tuple[str, str], int]:
        """Proposals that could not be used, by (drafter, kind of failure)."""
        return self._guard.failures

    def rehearse(self, live: int, tokens: int, context: int) -> float:
        """A round without requests, for measuring: `live` rows of `context` tokens verify `tokens` in all (as many as
        rows: a plain round).  Returns the seconds of its pass.  Raises ValueError while requests are live."""
        if len(self._batch):
            raise ValueError("the engine is decoding: rehearse before the first request")
        params = SamplingParams()
        self.prepare(params)
        prompt = torch.zeros(max(1, min(context, self._cache.max_len - 1)), dtype=torch.int32)
        for sample in range(live):
            self._batch.admit(GenerationRequest(NoiseKey(0, 0, 0, sample), prompt), params)
        share, more = divmod(tokens - live, live)
        counts = [share + (row < more) for row in range(live)]
        chain = [(row, depth) for row, count in enumerate(counts) for depth in range(1, count + 1)]
        tree = DraftTree.of_lists(
            [0] * len(chain),
            [-1 if depth == 1 else index - 1 for index, (_, depth) in enumerate(chain)],
            [row for row, _ in chain],
            [depth for _, depth in chain],
        )
        if self._static is not None:
            seconds = self._static.rehearse(tree, params)
        else:
            began_s = time.perf_counter()
            self._verify(DraftTree(*(x.to(self._batch.lengths_B.device) for x in tree)), params)
            if self._batch.lengths_B.is_cuda:
                torch.cuda.synchronize(self._batch.lengths_B.device)
            seconds = time.perf_counter() - began_s
        for row in reversed(range(live)):
            self._batch.remove(row)
        return seconds

    def _round(self, params: SamplingParams, on_round: Callable[[RoundTrace], None]) -> list[Finished]:
        """One round of the live batch: choose, draft, verify, commit, learn."""
        batch, started_s = self._batch, time.perf_counter()
        context, live, numbers = sum(batch.lengths), len(batch), tuple(self._numbers)
        strategy = OFF if self.speculation is None else self.speculation.tuner.choose(numbers, context)
        if self._static is not None:
            floors = NO_FLOORS if self.speculation is None else self.speculation.tuner.floors
            propose = partial(self._propose, strategy)
            outcome = self._static.run(strategy, floors, propose, params)
        else:
            outcome = self._dynamic_round(strategy, params)
        end_s = time.perf_counter()
        tokens = sum(batch.lengths) - context
        report = RoundReport(
            strategy=strategy,
            live=live,
            context=context,
            drafted=outcome.drafted,
            offered=outcome.offered,
            accepted=outcome.accepted,
            draft_s=outcome.draft_s,
            verify_s=outcome.verify_s,
            backlog_s=outcome.backlog_s,
        )
        if self.speculation is not None:
            self.speculation.tuner.observe(numbers, report)
        on_round(RoundTrace(report, numbers, tokens, time.time(), end_s - started_s))
        return outcome.finished

    def _dynamic_round(self, strategy: Strategy, params: SamplingParams) -> Outcome:
        """Draft, verify, commit; shapes are those of the live rows."""
        started_s, live = time.perf_counter(), len(self._batch)
        tree = DraftTree.empty() if strategy.is_off else self._propose(strategy, self._batch.view(params))
        drafted_s = time.perf_counter()
        backlog_s = self._backlog_s(strategy) if len(tree.tokens_N) else 0.0
        emitted = self._decode(tree, params)
        finished = self._batch.commit(emitted, params)
        verified_s = time.perf_counter()
        rows = tree.rows_N.tolist()
        offered = [0] * live
        for row, depth in zip(rows, tree.depths_N.tolist(), strict=True):
            offered[row] = max(offered[row], depth)
        return Outcome(
            finished,
            drafted=tuple(rows.count(row) for row in range(live)),
            offered=tuple(offered),
            accepted=tuple(count - 1 for count in emitted.counts_B.tolist()),
            draft_s=drafted_s - started_s - backlog_s,
            verify_s=verified_s - drafted_s,
            backlog_s=backlog_s,
        )

    def _propose(self, strategy: Strategy, view: LiveView) -> DraftTree:
        assert self.speculation is not None, "only a tuner chooses a strategy"
        drafter = self.speculation.drafters[strategy.drafter]
        return self._guard.propose(drafter, view._replace(floors=self.speculation.tuner.floors), strategy)

    def _backlog_s(self, strategy: Strategy) -> float:
        assert self.speculation is not None, "there is a draft, so there is a drafter"
        return self.speculation.drafters[strategy.drafter].backlog_s

    def _decode(self, tree: DraftTree, params: SamplingParams) -> Emitted:
        """Verify, and hand tapped hidden states to the drafters."""
        result = self._verify(tree, params)
        self._record(result.tapped_rows_T, result.tapped_positions_T, result.taps_TE)
        if self._recording is not None:
            self._recording.record(result)
        return result.emitted

    def _verify(self, tree: DraftTree, params: SamplingParams) -> RoundResult:
        """A plain round where there is nothing to verify."""
        if not len(tree.tokens_N):
            return plain_round(self.decoder, self._cache, self._batch, params, taps=self._taps)
        depth = int(tree.depths_N.max())
        return spec_round(self.decoder, self._cache, self._batch, tree, params, depth=depth, taps=self._taps)

    def _record_path(self, path: Path) -> None:
        """Of a round of fixed shape."""
        self._record(path.tapped_rows_T, path.tapped_positions_T, path.taps_TE)
        if self._recording is not None:
            self._recording.record(path)

    def _record(self, rows_T: Tensor, positions_T: Tensor, taps_TE: Tensor | None) -> None:
        for drafter in self._drafters:
            if drafter.taps and taps_TE is not None:
                drafter.record(rows_T, positions_T, taps_TE)

    def _admit(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> None:
        if not requests:
            return
        live = {_bytes(self._batch.request(row)): row for row in range(len(self._batch))}
        rows_by_prompt: dict[bytes, list[int]] = {}
        for request in requests:
            row = self._batch.admit(request, params)
            rows_by_prompt.setdefault(_bytes(request), []).append(row)
            self._numbers.append(self._requests_seen)
            self._requests_seen += 1
            for drafter in self._drafters:
                drafter.admit(row, request)
        # The last prompt token is left to the first round, which samples from it: siblings share all the rest.
        for prompt in rows_by_prompt.keys() & live.keys():
            for row in rows_by_prompt[prompt]:
                self._share(live[prompt], row)
        new = [rows for prompt, rows in rows_by_prompt.items() if prompt not in live]
        pending = [rows for rows in new if self._prefix_len(rows[0])]
        while pending:
            chunk: list[list[int]] = []
            tokens = 0
            while pending and (not chunk or tokens + self._prefix_len(pending[0][0]) <= _PREFILL_TOKENS):
                tokens += self._prefix_len(pending[0][0])
                chunk.append(pending.pop(0))
            self._prefill(chunk)

    @torch.inference_mode()
    def _share(self, source: int, row: int) -> None:
        """A sibling that is live has computed the prompt already."""
        length = self._prefix_len(row)
        self._cache.move(source, row, length)
        if self._recording is not None:
            self._recording.share(source, row, length)
        for drafter in self._drafters:
            if drafter.taps:
                drafter.share(source, row, length)

    def _prefix_len(self, row: int) -> int:
        return len(self._batch.request(row).prompt_tokens) - 1

    @torch.inference_mode()
    def _prefill(self, groups: list[list[int]]) -> None:
        prefixes = [self._batch.request(rows[0]).prompt_tokens[:-1] for rows in groups]
        device = self._batch.lengths_B.device
        offsets_S1 = torch.tensor([0, *(len(p) for p in prefixes)]).cumsum(0)
        positions_T = torch.cat([torch.arange(len(p)) for p in prefixes]).to(device)
        attend = self._cache.prefill_attend([rows[0] for rows in groups], offsets_S1.to(device))
        hidden = self.decoder(torch.cat(prefixes).to(device, torch.int64), positions_T, attend, taps=self._taps)
        for index, (rows, prefix) in enumerate(zip(groups, prefixes, strict=True)):
            for sibling in rows[1:]:
                self._cache.move(rows[0], sibling, len(prefix))
            if hidden.taps_TE is not None:
                part = slice(int(offsets_S1[index]), int(offsets_S1[index + 1]))
                for row in rows:
                    rows_T = torch.full_like(positions_T[part], row)
                    self._record(rows_T, positions_T[part], hidden.taps_TE[part])
                    if self._recording is not None:
                        self._recording.record_prompt(rows_T, positions_T[part], hidden.taps_TE[part])

    def _release(self, row: int, tokens: Tensor) -> None:
        last = len(self._batch) - 1
        length = self._batch.lengths[last]
        self._batch.remove(row)
        number, self._numbers[row] = self._numbers[row], self._numbers[last]
        self._numbers.pop()
        if self.speculation is not None:
            self.speculation.tuner.forget(number)
        for drafter in self._drafters:
            drafter.release(row, tokens)
        if last != row:
            self._cache.move(last, row, length)
            if self._recording is not None:
                self._recording.move(last, row)
            for drafter in self._drafters:
                drafter.move(last, row)


def _bytes(request: GenerationRequest) -> bytes:
    """Of its prompt: equal for siblings."""
    return request.prompt_tokens.numpy().tobytes()


def _common_taps(drafters: Iterable[Drafter], captured: tuple[int, ...]) -> tuple[int, ...]:
    wanted = {taps for taps in (captured, *(drafter.taps for drafter in drafters)) if taps}
    if len(wanted) > 1:
        raise ValueError(f"different hidden states are wanted ({sorted(wanted)}): use drafters of one kind")
    return next(iter(wanted), ())
