"""Rounds of fixed shape: what the target's passes and a drafter share, so that both can be captured as graphs.

A graph replays the same launches on the same memory.  So a round's rows are padded to a bucket and its draft trees to a
width, and everything that changes from round to round lies in buffers that do not move:

    host: lengths, room, floor -> Inputs -> [catch up, draft] -> PaddedTree -> target's pass -> tokens -> host

Rows behind the live ones are padding: one token long, without drafts, in cache slots that no request has.

Shapes: B rows of a bucket, C positions of a row, U draft tokens of a row (its bucket's width less one), N draft tokens
of all rows, W = U + 1.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from tlt_core.items.speculation import DraftTree, LiveView, Strategy
from tlt_core.items.types import SamplingParams

_WIDTHS = (1, 2, 3, 4, 5, 6, 8, 9, 13, 17, 25, 33, 49, 65)


class Inputs(NamedTuple):
    """What a round reads and writes, on the device, for all rows that there can be."""

    tokens_BC: Tensor  # int64, prompt and response so far, and room behind them for what a round may emit
    logprobs_BC: Tensor  # float32
    lengths_B: Tensor  # int64, tokens known; 1 in padding
    room_B: Tensor  # int64, tokens that a row may still emit; 1 in padding
    streams_B: Tensor  # int64
    log_min_prob: Tensor  # [] float32, of `speculation.MinDraftProbs.token`; -inf: none
    max_len: int  # of a row


class PaddedTree(NamedTuple):
    """Draft trees, U places a row.  A parent comes before its children.

    A row that drafts the siblings 7 and 8 and a child 9 of 8, in four places:
    tokens=[7, 8, 9, -1], parents=[-1, -1, 1, -1], depths=[1, 1, 2, 0].
    """

    tokens_BU: Tensor  # int64; -1: unused
    parents_BU: Tensor  # int64, place of the parent; -1: the row's newest token
    depths_BU: Tensor  # int64, 1 below the newest token; 0: unused

    @classmethod
    def empty(cls, rows: int, width: int, *, device: torch.device) -> "PaddedTree":
        """Nothing drafted.  width: W."""
        unused = torch.full((rows, width - 1), -1, dtype=torch.int64, device=device)
        return cls(unused, unused.clone(), torch.zeros_like(unused))

    def part(self, rows: int, width: int) -> "PaddedTree":
        """A view of the first rows and places, for a width W."""
        return PaddedTree(*(x[:rows, : width - 1] for x in self))

    def copy_(self, other: "PaddedTree") -> None:
        """Copy a tree of at most this width; the other places become unused."""
        width = other.tokens_BU.shape[1]
        for mine, theirs, unused in zip(self, other, (-1, -1, 0), strict=True):
            mine[:, :width].copy_(theirs)
            mine[:, width:].fill_(unused)


def padded(tree: DraftTree, *, rows: int, width: int) -> PaddedTree:
    """Pad a packed tree on the CPU, of at most width - 1 tokens a row."""
    counts_B = tree.rows_N.bincount(minlength=rows)
    columns_N = torch.arange(len(tree.rows_N)) - (counts_B.cumsum(0) - counts_B)[tree.rows_N]
    result = PaddedTree.empty(rows, width, device=torch.device("cpu"))
    at = (tree.rows_N, columns_N)
    result.tokens_BU[at], result.depths_BU[at] = tree.tokens_N, tree.depths_N
    has_parent_N = tree.parents_N >= 0
    result.parents_BU[at] = torch.where(has_parent_N, columns_N[tree.parents_N.clamp_min(0)], -1)
    return result


def row_bucket(live: int, most: int) -> int:
    """Rows of the graph that decodes `live` requests: a power of two, or all there can be."""
    return min(most, 1 << (live - 1).bit_length())


def row_buckets(most: int) -> tuple[int, ...]:
    """All buckets of up to `most` requests, ascending."""
    return tuple(sorted({row_bucket(live, most) for live in range(1, most + 1)}))


def width_bucket(tokens: int) -> int:
    """W of the graph that verifies `tokens` draft tokens of each row."""
    return next((width for width in _WIDTHS if tokens < width), tokens + 1)


def width_buckets(most_tokens: int) -> tuple[int, ...]:
    """All buckets of trees of 1 to `most_tokens` tokens a row, ascending."""
    return tuple(sorted({width_bucket(tokens) for tokens in range(1, most_tokens + 1)}))


class StaticDrafting(Protocol):
    """A drafter's rounds of fixed shape.  `catch_up` and `draft` are captured: they make the same launches in every
    call, never wait and read nothing from the host."""

    def begin(self, view: LiveView) -> None:
        """Before a round, on the host: learn where the live rows stand.  The view's tensors are on the device."""

    def catch_up(self, rows: int) -> None:
        """Run what the latest rounds added to each row."""

    def draft(self, rows: int, strategy: Strategy, params: SamplingParams, tree: PaddedTree) -> None:
        """Fill the tree; none deeper than strategy.depth or than the row's room - 1."""

    def end(self, lengths: Sequence[int]) -> None:
        """After a round, on the host; lengths: of the live rows before the round."""


@runtime_checkable
class HasStatic(Protocol):
    """A drafter (`speculation.Drafter`) that can draft in fixed shapes."""

    def static(self, inputs: Inputs, strategies: Sequence[Strategy]) -> StaticDrafting:
        """strategies: of this drafter.  Raises ValueError when its buffers are too small for them."""
        ...
