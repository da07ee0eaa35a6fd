"""Parts of sequences that are trained on in one pass, each with its whole context, packed without padding.

A pass of idle training must be short, but a sequence may be long.  So a pass trains some of its rows, and of the rows
before them computes only what the trained ones look at:

    rows      0 ............ | .. halo .. | start ............... end |       (of one sequence, at depth 1)
              key and value  | whole row  | whole row, and in the loss
              `--- context --'`----------- query rows ---------------'

Context is computed with its gradient: the sum of a sequence's windows is its loss and its gradient, exactly.  The halo
is what training with own outputs reaches back to: row p at depth k + 1 goes back to depth 1 at row p - k.

Shapes: R rows of the pack, of which C context and T query rows; L tokens of one sequence, E tapped width, J draft
vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tlt_core.drafter.eagle3.observe import draft_probs
from tlt_core.items.train_sequence import TrainSequence


@dataclass(frozen=True, slots=True)
class Window:
    """Rows start .. end - 1 of a sequence, all of them trained ones; those before them are its context."""

    sequence: TrainSequence
    start: int  # at least `sequence.earliest`
    end: int  # at most L - 2

    @property
    def rows(self) -> int:
        """Rows that are trained (at depth 1)."""
        return self.end - self.start


def whole(sequence: TrainSequence) -> list[Window]:
    """All trained rows in one window; no window where nothing is trained."""
    return cut(sequence, rows=max(sequence.rows, 1))


def cut(sequence: TrainSequence, *, rows: int) -> list[Window]:
    """Windows of at most `rows` trained rows that together are the sequence; none where nothing is trained."""
    first, end = sequence.earliest, sequence.earliest + sequence.rows
    return [Window(sequence, start, min(start + rows, end)) for start in range(first, end, rows)]


class Pack(NamedTuple):
    """Windows back to back: first the context rows of all, then the query rows (the windows' own) of all."""

    windows: tuple[Window, ...]  # halo included
    starts: list[int]  # row of each from which on it is trained
    tokens_R: Tensor  # read by the row
    taps_RE: Tensor
    positions_R: Tensor
    context: list[int]  # rows of each window
    queries: list[int]

    @classmethod
    def of(cls, windows: Sequence[Window], device: torch.device, *, halo: int = 0) -> "Pack":
        """On this device.  halo: rows before each window that are query rows too, as far as they are trained ones."""
        starts = [w.start for w in windows]
        if halo:
            windows = [Window(w.sequence, max(w.start - halo, w.sequence.earliest), w.end) for w in windows]
        parts = [(w.sequence, 0, w.start) for w in windows] + [(w.sequence, w.start, w.end) for w in windows]
        return cls(
            tuple(windows),
            starts,
            torch.cat([s.tokens_L[start + 1 : end + 1] for s, start, end in parts]).to(device, torch.int64),
            torch.cat([s.taps_LE[start:end] for s, start, end in parts]).to(device),
            torch.cat([torch.arange(start, end) for _, start, end in parts]).to(device),
            [w.start for w in windows],
            [w.end - w.start for w in windows],
        )

    @property
    def device(self) -> torch.device:
        """Where the pack's tensors are."""
        return self.taps_RE.device

    def counted_N(self, level: int) -> Tensor:
        """Index of the query rows that count at depth level + 1: of the window, and drafting began at a trained row."""
        starts, earliest = torch.tensor([self.starts, [w.sequence.earliest for w in self.windows]])
        counts, positions_T = torch.tensor(self.queries), self.positions_R[sum(self.context) :]
        starts_T, earliest_T = (x.repeat_interleave(counts).to(self.device) for x in (starts, earliest))
        return ((positions_T >= starts_T) & (positions_T - level >= earliest_T)).nonzero().squeeze(1)

    def in_order(self, context_C: Tensor, queries_T: Tensor) -> Tensor:
        """Rows window by window, each one's context before its query rows."""
        both = zip(context_C.split(self.context), queries_T.split(self.queries), strict=True)
        return torch.cat([part for pair in both for part in pair])

    def probs_TJ(self, heads: Mapping[int, Tensor]) -> Tensor:
        """The target's distribution of the token that each query row predicts.  Query rows must be trained ones.

        heads: draft vocabulary's rows of the LM head, by policy version.
        """

        def part(w: Window) -> Tensor:
            shift = 2 - w.sequence.first  # row p predicts token p + 2, which is sampled token p + 2 - first
            return draft_probs(w.sequence, slice(w.start + shift, w.end + shift), heads[w.sequence.policy_version])

        return self._gather(part)

    def targets_T(self) -> Tensor:
        """The token that each query row predicts, int64."""
        return self._gather(lambda w: w.sequence.tokens_L[w.start + 2 : w.end + 2]).to(torch.int64)

    def streams_T(self) -> Tensor:
        """Base of each query row's noise, int64."""
        return self._gather(lambda w: torch.full((w.end - w.start,), w.sequence.stream))

    def _gather(self, part: Callable[[Window], Tensor]) -> Tensor:
        return torch.cat([part(window) for window in self.windows]).to(self.device)
