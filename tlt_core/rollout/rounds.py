"""Rounds whose shapes are those of the live rows: what the engine does on a CPU.

    propose -> nodes of the pass -> spec_round -> commit

`static_rounds` has the rounds of fixed shape.  Both make their nodes, and `spec_round` does the rest.

Shapes: B live rows, N draft tokens of all rows, T = B + N nodes.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.sampling.spec_verify import AcceptedPath, accepted_path
from kernels.tree.tree_layout import tree_layout
from tlt_core.items.hidden_states import PathStates
from tlt_core.items.speculation import DraftTree, MinDraftProbs, RoundReport, Strategy
from tlt_core.items.types import SamplingParams
from tlt_core.model.decoder import Decoder
from tlt_core.rollout.batch import Finished, LiveBatch
from tlt_core.rollout.draft_check import GuardedDrafting
from tlt_core.rollout.kv_cache import SlotCache
from tlt_core.rollout.spec_round import Nodes, RoundResult, spec_round

Record = Callable[[PathStates], None]


class Outcome(NamedTuple):
    finished: list[Finished]
    report: RoundReport


class Rounds:
    """Decodes the live batch of one engine, round by round."""

    pool = None  # of captured rounds: these have no fixed shapes

    def __init__(
        self,
        decoder: Decoder,
        cache: SlotCache,
        batch: LiveBatch,
        *,
        drafting: GuardedDrafting,
        taps: tuple[int, ...],
        record: Record,
    ) -> None:
        """record: gets what the target computed for each round's tokens, if there are taps."""
        self._decoder, self._cache, self._batch = decoder, cache, batch
        self._drafting, self._taps, self._record = drafting, taps, record

    def prepare(self, params: SamplingParams) -> None:
        """Capture what decoding with these parameters needs, unless that was done.  No request may be live."""

    def release(self) -> None:
        """Give back the memory of what was captured; `prepare` captures it again.  Call it before moving weights."""

    def run(self, strategy: Strategy, min_draft_probs: MinDraftProbs, params: SamplingParams) -> Outcome:
        """One round: draft, verify, commit."""
        batch, live, context = self._batch, len(self._batch), sum(self._batch.lengths)
        started_s, tree, backlog_s = time.perf_counter(), DraftTree.empty(), 0.0
        if not strategy.is_off:
            tree = self._drafting.propose(batch.view(params)._replace(min_draft_probs=min_draft_probs), strategy)
            backlog_s = self._drafting.drafters[strategy.drafter].backlog_s if len(tree.tokens_N) else 0.0
        drafted_s = time.perf_counter()
        result = self._verify(tree, params)
        if result.states is not None:
            self._record(result.states)
        finished = batch.commit(result.emitted, params)
        verified_s = time.perf_counter()
        drafted, offered = [0] * live, [0] * live
        for row, depth in zip(tree.rows_N.tolist(), tree.depths_N.tolist(), strict=True):
            drafted[row] += 1
            offered[row] = max(offered[row], depth)
        report = RoundReport(
            strategy=strategy,
            live=live,
            context=context,
            drafted=tuple(drafted),
            offered=tuple(offered),
            accepted=tuple(count - 1 for count in result.emitted.counts_B.tolist()),
            draft_s=drafted_s - started_s - backlog_s,
            verify_s=verified_s - drafted_s,
            backlog_s=backlog_s,
        )
        return Outcome(finished, report)

    def rehearse(self, tree: DraftTree, params: SamplingParams) -> float:
        """Verify a tree on the CPU without emitting; the live batch stays as it was.  Returns the pass's seconds."""
        device = self._batch.lengths_B.device
        began_s = time.perf_counter()
        self._verify(DraftTree(*(x.to(device) for x in tree)), params)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began_s

    @torch.inference_mode()
    def _verify(self, tree: DraftTree, params: SamplingParams) -> RoundResult:
        cache, batch = self._cache, self._batch
        nodes = tree_nodes(cache, batch, tree) if len(tree.tokens_N) else newest_nodes(cache, batch)
        return spec_round(self._decoder, cache, nodes, params, taps=self._taps)


def newest_nodes(cache: SlotCache, batch: LiveBatch) -> Nodes:
    tokens_B, positions_B = batch.newest()
    attend = cache.decode_attend(positions_B, batch.longest)
    rows_B = attend.layout.rows_T
    path = AcceptedPath(rows_B[:, None], torch.ones_like(rows_B))
    return Nodes(
        tokens_B,
        rows_B,
        positions_B,
        positions_B,
        batch.streams_B[: len(batch)],
        attend,
        lambda _: path,
        fixed=False,
    )


def tree_nodes(cache: SlotCache, batch: LiveBatch, tree: DraftTree) -> Nodes:
    """Every row's newest token, then the draft tokens of all rows.  tree: of at least one token."""
    live, depth = len(batch), int(tree.depths_N.max())
    newest_B, positions_B = batch.newest()
    layout = tree_layout(positions_B, tree.parents_N, tree.rows_N, tree.depths_N, depth=depth)

    def walk(choice_T: Tensor) -> AcceptedPath:
        return accepted_path(choice_T, tree.tokens_N, tree.parents_N, tree.rows_N, num_rows=live, depth=depth)

    return Nodes(
        torch.cat([newest_B, tree.tokens_N]),
        layout.rows_T,
        layout.positions_T,
        layout.places_T,
        batch.streams_B[:live][layout.rows_T],
        cache.verify_attend(layout, live),
        walk,
        fixed=False,
    )
