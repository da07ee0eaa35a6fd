"""Parts of sequences that are trained on in one pass, each with its whole context, packed without padding.

Spot training is pre-empted between passes, so a pass must be short; a sequence may be long and is not cut.  So a pass
trains some rows of it, and computes of the rows before no more than the trained ones look at:

    rows      0 ............ | .. halo .. | start ............... end |       (of one sequence, at depth 1)
              key and value  | whole row  | whole row, and in the loss
              `--- context --'`----------- query rows ---------------'

Context is computed with its gradient: the sum of a sequence's windows is its loss and its gradient, exactly.  The halo
is what training with own outputs reaches back to: row p at depth k + 1 goes back to depth 1 at row p - k.

Shapes: R rows of the pack, of which C context and T query rows; L tokens of one sequence, E tapped width, J draft
vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from tlt_core.drafter.eagle3_sequence import TrainSequence


@dataclass(frozen=True, slots=True)
class Window:
    """Rows start .. end - 1 of a sequence count in the loss (those of them that are trained at all)."""

    sequence: TrainSequence
    start: int
    end: int  # at most L - 2

    def __post_init__(self) -> None:
        length, sampled = len(self.sequence.tokens_L), len(self.sequence.probs_PJ)
        if not 0 <= self.start < self.end <= length - 2:
            raise ValueError(f"rows {self.start} to {self.end} of a sequence of {length} tokens: it has {length - 2}")
        assert sampled == length - self.sequence.first, f"{sampled} distributions of {length} tokens"
        assert len(self.sequence.taps_LE) >= length - 1, "hidden states are missing"

    @property
    def rows(self) -> int:
        """Rows that are trained (at depth 1)."""
        return max(self.end - max(self.start, self.sequence.earliest), 0)


def cut(sequence: TrainSequence, *, rows: int) -> list[Window]:
    """Windows of at most `rows` trained rows that together are the sequence; none where nothing is trained."""
    first, end = sequence.earliest, sequence.earliest + sequence.rows
    return [Window(sequence, start, min(start + rows, end)) for start in range(first, end, rows)]


class Span(NamedTuple):
    """Query rows of one sequence; those before them are its context."""

    sequence: TrainSequence
    start: int
    end: int


class Pack(NamedTuple):
    """Spans back to back: first the context rows of all, then the query rows of all."""

    spans: tuple[Span, ...]
    tokens_R: Tensor  # read by the row
    taps_RE: Tensor
    positions_R: Tensor
    context: list[int]  # rows of each span
    queries: list[int]

    @classmethod
    def of(cls, spans: Sequence[Span], device: torch.device) -> "Pack":
        """The sequences may be on another device."""
        parts = [(s.sequence, 0, s.start) for s in spans] + [(s.sequence, s.start, s.end) for s in spans]
        return cls(
            tuple(spans),
            torch.cat([s.tokens_L[start + 1 : end + 1] for s, start, end in parts]).to(device, torch.int64),
            torch.cat([s.taps_LE[start:end] for s, start, end in parts]).to(device),
            torch.cat([torch.arange(start, end) for _, start, end in parts]).to(device),
            [s.start for s in spans],
            [s.end - s.start for s in spans],
        )

    @property
    def device(self) -> torch.device:
        """Where the pack's tensors are."""
        return self.taps_RE.device

    @property
    def query_offsets_S1(self) -> Tensor:
        """Start of each span's query rows, and T; int64 on the CPU."""
        return torch.tensor([0, *accumulate(self.queries)])

    @property
    def key_offsets_S1(self) -> Tensor:
        """Start of each span's rows when context and query rows are put in order, and R; int64 on the CPU."""
        return torch.tensor([0, *accumulate(s.end for s in self.spans)])

    def in_order(self, context_C: Tensor, queries_T: Tensor) -> Tensor:
        """Rows span by span, each one's context before its query rows."""
        both = zip(context_C.split(self.context), queries_T.split(self.queries), strict=True)
        return torch.cat([part for pair in both for part in pair])

    def probs_TJ(self) -> Tensor:
        """Distribution of the token that each query row predicts.  Query rows must not lie before the trained ones."""

        def part(span: Span) -> Tensor:
            shift = 2 - span.sequence.first  # row p predicts token p + 2, which is sampled token p + 2 - first
            return span.sequence.probs_PJ[span.start + shift : span.end + shift]

        return self._gather(part)

    def next_taps_TE(self) -> Tensor:
        """Hidden states of the token that each query row reads."""
        return self._gather(lambda s: s.sequence.taps_LE[s.start + 1 : s.end + 1])

    def targets_T(self) -> Tensor:
        """The token that each query row predicts, int64."""
        return self._gather(lambda s: s.sequence.tokens_L[s.start + 2 : s.end + 2]).to(torch.int64)

    def streams_T(self) -> Tensor:
        """Base of each query row's noise, int64."""
        return self._gather(lambda s: torch.full((s.end - s.start,), s.sequence.stream))

    def _gather(self, part: Callable[[Span], Tensor]) -> Tensor:
        return torch.cat([part(span) for span in self.spans]).to(self.device)


class TrainPack(NamedTuple):
    """The pack of some windows, and which of its query rows count."""

    pack: Pack
    positions_T: Tensor
    starts_T: Tensor  # the window's first row
    earliest_T: Tensor  # the sequence's first trained row

    @classmethod
    def of(cls, windows: Sequence[Window], *, depth: int, device: torch.device) -> "TrainPack":
        """Raises ValueError when no row of the windows is trained."""
        kept = [window for window in windows if window.rows]
        if not kept:
            raise ValueError(
                "nothing to train: no row predicts a sampled token (a sequence needs three tokens at least)"
            )
        spans = [
            Span(window.sequence, max(window.start - (depth - 1), window.sequence.earliest), window.end)
            for window in kept
        ]
        pack = Pack.of(spans, device)
        counts = torch.tensor(pack.queries)
        starts, earliest = torch.tensor([[w.start for w in kept], [w.sequence.earliest for w in kept]])
        return cls(
            pack,
            pack.positions_R[sum(pack.context) :],
            starts.repeat_interleave(counts).to(device),
            earliest.repeat_interleave(counts).to(device),
        )

    def counted_N(self, level: int) -> Tensor:
        """Index of the query rows that count at depth level + 1: of the window, and drafting began at a trained row."""
        counts_T = (self.positions_T >= self.starts_T) & (self.positions_T - level >= self.earliest_T)
        return counts_T.nonzero().squeeze(1)
