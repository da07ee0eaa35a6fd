"""Rounds in fixed shapes: what the engine does on a GPU, where every launch counts and every wait costs more.

    upload lengths -> [catch up -> draft] -> verify -> fetch tokens and counts (the one wait) -> lengths on the host

Each step on the device is one graph of the pool (`graphs.py`), chosen by kind, rows and width; between them the host
waits for nothing.  A drafter that can draft in fixed shapes (`static_shapes.HasStatic`) does it on the device; another
one drafts on the host, from the host's copy of the tokens, and its trees are filled up.

Shapes: B rows of a bucket, W nodes of a row, U = W - 1, A tokens that a row may emit, T = B A.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from tlt_core.model.decoder import Decoder
from tlt_core.rollout.batch import Finished
from tlt_core.rollout.graphs import EagerPool, GraphKey, GraphPool, Sampling, make_pool
from tlt_core.rollout.kv_cache import SlotCache
from tlt_core.rollout.static_batch import StaticBatch
from tlt_core.rollout.static_pass import PassShape, Path, StaticTarget, static_pass
from tlt_core.speculation import Drafter, DraftTree, Floors, LiveView, Strategy
from tlt_core.static_shapes import (
    HasStatic,
    PaddedTree,
    StaticDrafting,
    padded,
    row_bucket,
    row_buckets,
    width_bucket,
    width_buckets,
)
from tlt_core.types import SamplingParams

Propose = Callable[[LiveView], DraftTree]


class Outcome(NamedTuple):
    """What a round did, as `RoundReport` wants it."""

    finished: list[Finished]
    drafted: tuple[int, ...]
    offered: tuple[int, ...]
    accepted: tuple[int, ...]
    draft_s: float
    verify_s: float  # of the round alone: what the device had still to do before it, a prefill say, is left out
    backlog_s: float


class StaticRounds:
    """Owns the static buffers and the pool of one engine."""

    def __init__(
        self,
        decoder: Decoder,
        cache: SlotCache,
        batch: StaticBatch,
        *,
        drafters: Mapping[str, Drafter],
        menu: Sequence[Strategy],
        taps: tuple[int, ...],
        record: Callable[[Path], None],
    ) -> None:
        """taps: wanted by the drafters or a capture; record: gets those of each round's new tokens."""
        device, self._most = decoder.head_weight.device, len(batch.lengths_B)
        self._batch, self._taps, self._record = batch, taps, record
        self._depth = max((s.depth for s in menu), default=0)
        self._widest = widest(menu)
        tree = PaddedTree.empty(self._most, self._widest, device=device)
        size = sum(x.numel() for x in tree)
        self._staged = torch.zeros(size, dtype=torch.int64, device=device)
        self._staged_host = torch.zeros(size, dtype=torch.int64, pin_memory=device.type == "cuda")
        emitted = self._most * (1 + self._depth)
        path = _path_buffers(decoder, emitted, taps) if taps else _path_buffers(decoder, 0, ())
        self._target = StaticTarget(decoder, cache, batch.inputs, tree, batch.report_BP, path, taps)
        self._menu = [s for s in menu if not s.is_off]
        self._static: dict[str, StaticDrafting] = {
            name: drafter.static(batch.inputs, [s for s in self._menu if s.drafter == name])
            for name, drafter in drafters.items()
            if isinstance(drafter, HasStatic)
        }
        host = max((s.tokens for s in self._menu if s.drafter not in self._static), default=0)
        widths = {width_bucket(s.tokens) for s in self._menu if s.drafter in self._static} | set(width_buckets(host))
        self._widths = (1, *sorted(widths))  # of the target's passes
        self.pool: EagerPool | GraphPool = make_pool(device)
        self._captured: set[Sampling] = set()
        self._timer = _Timer(device)

    def prepare(self, params: SamplingParams) -> None:
        """Capture what decoding with these parameters needs, unless that was done.  No request may be live: captured
        functions are run on the way."""
        sampling = Sampling.of(params)
        if sampling in self._captured:
            return
        assert not len(self._batch), "graphs are captured before the first request"
        self._batch.upload(Floors())
        works = dict(self._works(params))
        if self._captured:
            works = {key: work for key, work in works.items() if key.sampling is not None}
        self.pool.capture(works)
        self._captured.add(sampling)

    def release(self) -> None:
        """Give the graphs' memory back; `prepare` captures them again.  For whoever moves weights or buffers, too."""
        self.pool.release()
        self._captured.clear()

    def run(self, strategy: Strategy, floors: Floors, propose: Propose, params: SamplingParams) -> Outcome:
        """One round of the live batch.  propose: asks a drafter that drafts on the host."""
        batch, live = self._batch, len(self._batch)
        rows = row_bucket(live, self._most)
        batch.upload(floors)
        drafting = None if strategy.is_off else self._static.get(strategy.drafter)
        self._timer.mark("start")
        if drafting is not None:
            drafting.begin(batch.device_view(params))
        self._timer.mark("caught up")
        if strategy.is_off:
            width = 1
        elif drafting is None:
            width = self._place(propose(batch.view(params)), rows)
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
        return Outcome(
            finished,
            drafted=tuple(report.drafted for report in reports),
            offered=tuple(report.offered for report in reports),
            accepted=tuple(len(report.tokens) - 1 for report in reports),
            draft_s=self._timer.seconds("caught up", "drafted"),
            verify_s=self._timer.seconds("drafted", "verified") + time.perf_counter() - fetched_s,
            backlog_s=self._timer.seconds("start", "caught up"),
        )

    def rehearse(self, tree: DraftTree, params: SamplingParams) -> float:
        """Verify without emitting; leaves the batch as it was.  Returns the pass's seconds."""
        rows = row_bucket(len(self._batch), self._most)
        self._batch.upload(Floors())
        width = self._place(tree, rows)
        self._timer.mark("drafted")
        self._verify(0, rows, width, params)
        self._timer.mark("verified")
        self._batch.fetch()
        return self._timer.seconds("drafted", "verified")

    def _place(self, tree: DraftTree, rows: int) -> int:
        """Put a tree of the host into the buffers; returns the width that it needs."""
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
        if self._taps and live:
            self._record(self._target.path.part(live * shape.emitted))

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
                for strategy in (s for s in self._menu if s.drafter == name):
                    width = width_bucket(strategy.tokens)
                    tree = self._target.tree.part(rows, width)
                    work = partial(drafting.draft, rows, strategy, params, tree)
                    yield GraphKey("draft", rows, width, sampling, strategy), work


def widest(menu: Sequence[Strategy]) -> int:
    """W of the widest pass that the menu needs."""
    return width_bucket(max((s.tokens for s in menu), default=0))


def _path_buffers(decoder: Decoder, count: int, taps: tuple[int, ...]) -> Path:
    weight, size = decoder.head_weight, decoder.config.hidden_size

    def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(count, *shape, dtype=dtype, device=weight.device)

    return Path(
        zeros(dtype=torch.int64),
        zeros(dtype=torch.int64),
        zeros(len(taps) * size, dtype=weight.dtype) if taps else None,
        zeros(size, dtype=weight.dtype),
        zeros(dtype=torch.float32),
    )


class _Timer:
    """Seconds between two marks of a round, on the device; to be read after the device was waited for."""

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
