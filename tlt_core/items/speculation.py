"""What the parts of speculative decoding say to each other: strategies, draft trees, drafters, the tuner.

    tuner.choose -> Strategy -> drafter.propose -> DraftTree -> verification (tlt_core/rollout) -> RoundReport
         ^                                                                                            |
         +------------------------------------ tuner.observe -----------------------------------------+

A drafter only proposes.  Verification decides with the target's own choice, so nothing that a drafter does can change a
sampled token, even if it is wrong or fails (see `tlt_core/rollout/spec_round`).

Shapes: B live rows, C positions of a row, N draft tokens of all rows together.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tlt_core.items.hidden_states import HiddenStates
from tlt_core.items.types import GenerationRequest, SamplingParams


class Strategy(NamedTuple):
    """How a round speculates.  Strategy("ngram", depth=4, width=1, tokens=4) drafts a chain of four."""

    drafter: str  # name of the drafter; "off": plain decoding
    depth: int  # longest path drafted below the newest token
    width: int  # most children of one node; 1: a chain
    tokens: int  # most draft tokens verified per request

    @property
    def is_off(self) -> bool:
        return self.tokens == 0

    def __str__(self) -> str:
        return "off" if self.is_off else f"{self.drafter}:{self.depth}x{self.width}/{self.tokens}"


OFF = Strategy("off", depth=0, width=0, tokens=0)


class DraftTree(NamedTuple):
    """Draft tokens of a live batch, packed.  A parent comes before its children; siblings have different tokens.

    Row 0 drafts the chain 5, 9 and row 2 the siblings 7 and 8:
    tokens_N=[5, 9, 7, 8], parents_N=[-1, 0, -1, -1], rows_N=[0, 0, 2, 2], depths_N=[1, 2, 1, 1].
    """

    tokens_N: Tensor  # int64
    parents_N: Tensor  # int64, index of the parent in 0 .. N-1; -1: the row's newest token
    rows_N: Tensor  # int64, ascending
    depths_N: Tensor  # int64, 1 below the newest token

    @classmethod
    def of_lists(
        cls, tokens: Sequence[int], parents: Sequence[int], rows: Sequence[int], depths: Sequence[int]
    ) -> "DraftTree":
        return cls(*(torch.tensor(list(values), dtype=torch.int64) for values in (tokens, parents, rows, depths)))

    @classmethod
    def empty(cls) -> "DraftTree":
        return cls.of_lists([], [], [], [])


class MinDraftProbs(NamedTuple):
    """What drafting must promise to be worth its time; 0: draft and verify all that the strategy allows."""

    token: float = 0.0  # a draft token with a smaller estimated chance of acceptance is not verified
    level: float = 0.0  # a level of the tree, of all rows together, that promises fewer accepted tokens is not drafted


NO_MIN_DRAFT_PROBS = MinDraftProbs()


class LiveView(NamedTuple):
    """What a drafter may read of the live batch; it must not write to it."""

    requests: Sequence[GenerationRequest]  # of rows 0 .. B-1
    tokens_BC: Tensor  # [B, C] int64: prompt and response so far; what lies beyond the length is meaningless
    lengths: Sequence[int]  # tokens known of each row; the token at lengths[b] is the next to be sampled
    room: Sequence[int]  # tokens that each row may still emit, at least 1
    streams_B: Tensor  # [B] int64, base of each row's noise (`sampling.row_keys`)
    params: SamplingParams
    min_draft_probs: MinDraftProbs = NO_MIN_DRAFT_PROBS


class Drafter(Protocol):
    """Proposes continuations of live requests.  Only the rollout engine calls it, from one thread.

    Rows are those of the live batch.  `admit` fills the next row.  When a request ends, `release(row)` comes first,
    then `move(last, row)` brings the last row into the gap.  A drafter reads tokens from the view when it is asked to
    propose.  It then catches up with the tokens that were decoded without it.
    """

    name: str
    backlog_s: float  # of the latest proposal: seconds spent on catching up with rounds that did not use this drafter
    taps: tuple[int, ...]  # residual streams of the target that it wants to read (see `Decoder.forward`); often none

    def admit(self, row: int, request: GenerationRequest) -> None:
        """A request begins in a row."""

    def borrow(self, hidden: HiddenStates) -> None:
        """Before the first request: where the engine keeps the hidden states of all known tokens.  The drafter reads
        them and never writes.  Not called when `taps` is empty."""

    def propose(self, view: LiveView, strategy: Strategy) -> DraftTree:
        """At most strategy.tokens draft tokens a row, none deeper than strategy.depth or than the row's room - 1."""
        ...

    def move(self, source: int, target: int) -> None:
        """The request in row `source` is now in row `target`, whose own request has ended."""

    def release(self, row: int, tokens: Tensor) -> None:
        """The request in `row` ended with these tokens (prompt and response, int32)."""


class RoundReport(NamedTuple):
    """What one round did, as the tuner learns from it."""

    strategy: Strategy  # as chosen
    live: int  # requests decoded
    context: int  # tokens known of all live requests together, before the round
    drafted: tuple[int, ...]  # draft tokens verified, per row
    offered: tuple[int, ...]  # depth of the deepest draft token, per row
    accepted: tuple[int, ...]  # draft tokens accepted, per row (a row emits one token more, unless it ended)
    draft_s: float  # seconds in the drafter, without `backlog_s`
    verify_s: float  # seconds in the target's pass, sampling and commit; the whole round when it is plain
    backlog_s: float = 0.0  # seconds in which the drafter caught up with rounds that did not use it


class Tuner(Protocol):
    """Chooses the strategy of the next round from what it has measured."""

    min_draft_probs: MinDraftProbs  # of the latest choice

    def choose(self, rows: Sequence[int], context: int) -> Strategy:
        """rows: a number for each live request that stays the same for its life, unlike its row of the batch; context
        as in RoundReport."""
        ...

    def observe(self, rows: Sequence[int], report: RoundReport) -> None:
        """Learn from the round that was made for the latest choice.  `rows` as given to `choose`."""

    def forget(self, row: int) -> None:
        """A request has ended."""

    def state_dict(self) -> Mapping[str, Any]:
        """What was learnt, as JSON values; it outlives a restart."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what `state_dict` returned; entries that no longer fit the strategies are dropped."""
