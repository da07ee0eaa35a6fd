"""Rounds of fixed shape: what the engine does on a GPU, where launches and waits cost more than padding.

    upload lengths -> [catch up -> draft] -> verify -> fetch tokens and counts (the one wait) -> lengths on the host

Each step on the device is one graph of the pool (`graphs`), chosen by kind, rows and width.  The host waits once a
round.  A drafter that can draft in fixed shapes (`static_shapes.HasStatic`) drafts on the device.  Any other drafter
drafts on the host, from the host's copy of the tokens, and its trees are padded.

Shapes: B rows of a bucket, W nodes of a row, U = W - 1, A tokens that a row may emit, T = B A.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from tlt_core.items.hidden_states import PathStates
from tlt_core.items.speculation import DraftTree, MinDraftProbs, RoundReport, Strategy
from tlt_core.items.static_shapes import (
    HasStatic,
    PaddedTree,
    StaticDrafting,
    padded,
    row_bucket,
    row_buckets,
    width_bucket,
    width_buckets,
)
from tlt_core.items.types import SamplingParams
from tlt_core.model.decoder import Decoder
from tlt_core.rollout.draft_check import GuardedDrafting
from tlt_core.rollout.graphs import EagerPool, GraphKey, GraphPool, Sampling, make_pool
from tlt_core.rollout.kv_cache import SlotCache
from tlt_core.rollout.rounds import Outcome, Record
from tlt_core.rollout.static_batch import StaticBatch
from tlt_core.rollout.static_pass import PassShape, StaticTarget, static_pass


class StaticRounds:
    """`rounds.Rounds` whose steps can be captured.  Owns the static buffers and the pool of one engine."""

    def __init__(
        self,
        decoder: Decoder,
        cache: SlotCache,
        batch: StaticBatch,
        *,
        drafting: GuardedDrafting,
        strategies: Sequence[Strategy],
        taps: tuple[int, ...],
        record: Record,
    ) -> None:
        """record: gets what the target computed for each round's tokens, if there are taps."""
        device, self._most = decoder.head_weight.device, len(batch.lengths_B)
        self._batch, self._drafting, self._record = batch, drafting, record
        self._depth = max((s.depth for s in strategies), default=0)
        self._widest = widest(strategies)
        tree = PaddedTree.empty(self._most, self._widest, device=device)
        size = sum(x.numel() for x in tree)
        self._staged = torch.zeros(size, dtype=torch.int64, device=device)
        self._staged_host = torch.zeros(size, dtype=torch.int64, pin_memory=device.type == "cuda")
        states = _state_buffers(decoder, self._most * (1 + self._depth), taps) if taps else None
        self._target = StaticTarget(decoder, cache, batch.inputs, tree, batch.report_BP, states, taps)
        self._strategies = [s for s in strategies if not s.is_off]
        self._static: dict[str, StaticDrafting] = {
            name: drafter.static(batch.inputs, [s for s in self._strategies if s.drafter == name])
            for name, drafter in drafting.drafters.items()
            if isinstance(drafter, HasStatic)
        }
        host = max((s.tokens for s in self._strategies if s.drafter not in self._static), default=0)
        widths = {width_bucket(s.tokens) for s in self._strategies if s.drafter in self._static} | set(
            width_buckets(host)
        )
        self._widths = (1, *sorted(widths))  # of the target's passes
        self.pool: EagerPool | GraphPool = make_pool(device)
        self._captured: set[Sampling] = set()
        self._timer = _Timer(device)

    def prepare(self, params: SamplingParams) -> None:
        """See `Rounds`: captured functions are run on the way."""
        sampling = Sampling.of(params)
        if sampling in self._captured:
            return
        assert not len(self._batch), "graphs are captured before the first request"
        self._batch.upload(MinDraftProbs())
        works = dict(self._works(params))
        if self._captured:
            works = {key: work for key, work in works.items() if key.sampling is not None}
        self.pool.capture(works)
        self._captured.add(sampling)

    def release(self) -> None:
        """See `Rounds`."""
        self.pool.release()
        self._captured.clear()

    def run(self, strategy: Strategy, min_draft_probs: MinDraftProbs, params: SamplingParams) -> Outcome:
        """See `Rounds`."""
        batch, live, context = self._batch, len(self._batch), sum(self._batch.lengths)
        rows = row_bucket(live, self._most)
        batch.upload(min_draft_probs)
        drafting = None if strategy.is_off else self._static.get(strategy.drafter)
        self._timer.mark("start")
        if drafting is not None:
            drafting.begin(batch.device_view(params))
        self._timer.mark("caught up")
        if strategy.is_off:
            width = 1
        elif drafting is None:
            view = batch.view(params)._replace(min_draft_probs=min_draft_probs)
            width = self._place(self._drafting.propose(view, strategy), rows)
        else:
            width = width_bucket(strategy.tokens)
            self.pool.run(GraphKey("extend", rows, 1 + self._depth))
            self.pool.run(GraphKey("draft", rows, width, Sampling.of(params), strategy))
            drafting.end(batch.lengths)
        self._timer.mark("drafted")
        self._verify(live, rows, width, params)
        self._timer.mark("verified")
        reports = batch.fetch()
        fetched_s = time.perf_counter()
        finished = batch.settle([report.tokens for report in reports], params)
        report = RoundReport(
            strategy=strategy,
            live=live,
            context=context,
            drafted=tuple(report.drafted for report in reports),
            offered=tuple(report.offered for report in reports),
            accepted=tuple(len(report.tokens) - 1 for report in reports),
            draft_s=self._timer.seconds("caught up", "drafted"),
            # without what the device had still to do before the round, a prefill for example
            verify_s=self._timer.seconds("drafted", "verified") + time.perf_counter() - fetched_s,
            backlog_s=self._timer.seconds("start", "caught up"),
        )
        return Outcome(finished, report)

    def rehearse(self, tree: DraftTree, params: SamplingParams) -> float:
        """See `Rounds`."""
        rows = row_bucket(len(self._batch), self._most)
        self._batch.upload(MinDraftProbs())
        width = self._place(tree, rows)
        self._timer.mark("drafted")
        self._verify(0, rows, width, params)
        self._timer.mark("verified")
        self._batch.fetch()
        return self._timer.seconds("drafted", "verified")

    def _place(self, tree: DraftTree, rows: int) -> int:
        """Put a tree of the host into the buffers; returns the width of the pass that holds it."""
        if not len(tree.tokens_N):
            return 1
        drafted = int(tree.rows_N.bincount().max())
        width = next(width for width in self._widths if drafted < width)
        values = torch.stack(padded(tree, rows=rows, width=width))
        host, device = (x[: values.numel()].view(values.shape) for x in (self._staged_host, self._staged))
        host.copy_(values)
        device.copy_(host, non_blocking=True)  # both contiguous: the copy needs no memory that is not pinned
        self._target.tree.part(rows, width).copy_(PaddedTree(*device))
        return width

    def _verify(self, live: int, rows: int, width: int, params: SamplingParams) -> None:
        shape = self._shape(rows, width)
        self.pool.run(GraphKey("plain" if width == 1 else "verify", rows, width, Sampling.of(params)))
        states = self._target.states
        if states is not None and live:
            self._record(PathStates(*(x[: live * shape.emitted] for x in states)))

    def _shape(self, rows: int, width: int) -> PassShape:
        return PassShape(rows, width, 1 + min(width - 1, self._depth))

    def _works(self, params: SamplingParams) -> Iterator[tuple[GraphKey, Callable[[], None]]]:
        sampling = Sampling.of(params)
        for rows in row_buckets(self._most):
            for width in self._widths:
                kind = "plain" if width == 1 else "verify"
                work = partial(static_pass, self._target, self._shape(rows, width), params)
                yield GraphKey(kind, rows, width, sampling), work
            for name, drafting in self._static.items():
                yield GraphKey("extend", rows, 1 + self._depth), partial(drafting.catch_up, rows)
                for strategy in (s for s in self._strategies if s.drafter == name):
                    width = width_bucket(strategy.tokens)
                    tree = self._target.tree.part(rows, width)
                    work = partial(drafting.draft, rows, strategy, params, tree)
                    yield GraphKey("draft", rows, width, sampling, strategy), work


def widest(strategies: Sequence[Strategy]) -> int:
    """W of the widest pass that the strategies need."""
    return width_bucket(max((s.tokens for s in strategies), default=0))


def _state_buffers(decoder: Decoder, count: int, taps: tuple[int, ...]) -> PathStates:
    weight, size = decoder.head_weight, decoder.config.hidden_size

    def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(count, *shape, dtype=dtype, device=weight.device)

    return PathStates(
        zeros(dtype=torch.int64),
        zeros(dtype=torch.int64),
        zeros(len(taps) * size, dtype=weight.dtype),
        zeros(size, dtype=weight.dtype),
        zeros(dtype=torch.float32),
    )


class _Timer:
    """Seconds between two marks of a round, on the device.  Read them after the device has been waited for."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._events: dict[str, torch.cuda.Event] = {}
        self._times: dict[str, float] = {}

    def mark(self, name: str) -> None:
        if not self._on_gpu:
            self._times[name] = time.perf_counter()
            return
        if name not in self._events:
            self._events[name] = torch.cuda.Event(enable_timing=True)
        self._events[name].record()

    def seconds(self, start: str, end: str) -> float:
        if not self._on_gpu:
            return self._times[end] - self._times[start]
        return self._events[start].elapsed_time(self._events[end]) / 1e3
