"""What a drafter has accepted along held-back responses, measured piece by piece in idle time.

    held responses -> windows -> Measurement of the drafter in use  \\
                             `-> Measurement of a candidate          `-> Comparison

Chains are drafted from every row of a window, with the response's own noise: exactly what the engine's chains would
have had accepted there.  A response counts with one window at most, so that one long one does not outvote the others.
"""

import copy
import time
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tlt_core.drafter.eagle3_acceptance import AcceptanceMeasure, measure_starts
from tlt_core.drafter.eagle3_model import Eagle3Model
from tlt_core.drafter.eagle3_sequence import TrainSequence
from tlt_core.drafter.eagle3_windows import Span, cut
from tlt_core.spot.comparison import Comparison, Group
from tlt_core.types import SamplingParams


class HeldWindow(NamedTuple):
    """Rows that chains start from, and the prompt and step that the response belongs to."""

    group: tuple[int, int]
    starts: Span


class ChainSettings(NamedTuple):
    """How chains are drafted."""

    embedding_VD: Tensor
    depth: int
    params: SamplingParams
    compute_dtype: torch.dtype
    pass_rows: int  # starts measured in one pass, at most, where a window alone has not more


def held_windows(
    held: Iterable[tuple[tuple[int, int], TrainSequence]], *, rows: int, max_starts: int
) -> list[HeldWindow]:
    """One window of `rows` rows at most of each response, as many as reach max_starts; the first response of every
    group before the second of any, because it is groups that tell.

    Which window of a long response: by its noise's stream, that is at random but always the same.
    """
    by_group: dict[tuple[int, int], list[HeldWindow]] = {}
    for group, sequence in held:
        windows = cut(sequence, rows=rows)
        if windows:
            window = windows[sequence.stream % len(windows)]
            by_group.setdefault(group, []).append(HeldWindow(group, Span(sequence, window.start, window.end)))
    chosen: dict[tuple[int, int], list[HeldWindow]] = {group: [] for group in by_group}
    starts = 0
    for siblings in zip_longest(*by_group.values()):
        for own in siblings:
            if own is not None and starts < max_starts:
                chosen[own.group].append(own)
                starts += own.starts.end - own.starts.start
    return [window for own_windows in chosen.values() for window in own_windows]


class Measurement:
    """One model along some windows; `step` until `done`."""

    def __init__(self, model: Eagle3Model, windows: Sequence[HeldWindow]) -> None:
        self.model = model
        self.seconds = 0.0
        self.counts: dict[tuple[int, int], tuple[int, int]] = {}  # starts and accepted drafts, by group
        self._waiting = list(windows)
        self._ready: Eagle3Model | None = None  # to be computed with

    @property
    def done(self) -> bool:
        """Nothing is left to measure."""
        return not self._waiting

    def step(self, settings: ChainSettings) -> None:
        """One more pass: the next window, and those of the same group that fit in with it."""
        began_s = time.perf_counter()
        group, first = self._waiting.pop(0)
        starts, rows = [first], first.end - first.start
        while self._waiting and self._waiting[0].group == group:
            more = self._waiting[0].starts
            rows += more.end - more.start
            if rows > settings.pass_rows:
                break
            starts.append(self._waiting.pop(0).starts)
        if self._ready is None:
            self._ready = _with_weights_in(self.model, settings.compute_dtype)
        measure: AcceptanceMeasure = measure_starts(
            self._ready,
            settings.embedding_VD,
            starts,
            depth=settings.depth,
            params=settings.params,
            compute_dtype=settings.compute_dtype,
        )
        known, accepted = self.counts.get(group, (0, 0))
        self.counts[group] = known + measure.starts, accepted + sum(measure.accepted_by_depth)
        self.seconds += time.perf_counter() - began_s


def _with_weights_in(model: Eagle3Model, dtype: torch.dtype) -> Eagle3Model:
    """The same results from less memory traffic: autocast would cast every weight anew in every product."""
    if dtype == torch.float32:
        return model
    cast = copy.deepcopy(model)
    for linear in cast.modules():
        if isinstance(linear, nn.Linear):
            linear.weight = nn.Parameter(linear.weight.detach().to(dtype), requires_grad=False)
    return cast


def compare(used: Measurement, candidate: Measurement) -> Comparison:
    """Of two models along the same windows, both done."""
    assert used.counts.keys() == candidate.counts.keys(), "measured on the same windows"
    return Comparison.of(
        Group(starts, accepted, candidate.counts[group][1]) for group, (starts, accepted) in used.counts.items()
    )
