"""The trial of a candidate: what it and the drafter in use get accepted along held-back responses, piece by piece.

    held-back responses -> windows -> Measurement of the drafter in use  \\
                                 `-> Measurement of the candidate        `-> Comparison

Chains are drafted from every row of a window, with the response's own noise: exactly what the engine's chains would
have had accepted there.  A response has one window at most, so that a long one does not outvote the others.
"""

import copy
import time
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tlt_core.drafter.eagle3.acceptance import AcceptanceMeasure, measure_starts
from tlt_core.drafter.eagle3.model import Eagle3Model
from tlt_core.drafter.eagle3.windows import Window, cut
from tlt_core.idle_training.comparison import Comparison, Group
from tlt_core.items.train_sequence import TrainSequence
from tlt_core.items.types import SamplingParams


class TrialSettings(NamedTuple):
    """How chains are drafted."""

    embedding_VD: Tensor
    depth: int
    params: SamplingParams
    compute_dtype: torch.dtype
    pass_rows: int = 128  # rows of a window, and of the windows of one pass, at most: a pass is not interrupted


def group_of(sequence: TrainSequence) -> tuple[int, int]:
    """Step and prompt: responses of one group are alike."""
    return sequence.step, sequence.key.prompt_id


def trial_windows(held: Iterable[TrainSequence], *, rows: int, max_starts: int) -> list[Window]:
    """One window of `rows` rows at most of each response, group by group, as many as reach max_starts.

    The first response of every group comes before the second of any, because groups count as independent.  The window
    of a long response is chosen by its noise stream: at random, but always the same.
    """
    by_group: dict[tuple[int, int], list[Window]] = {}
    for sequence in held:
        windows = cut(sequence, rows=rows)
        if windows:
            by_group.setdefault(group_of(sequence), []).append(windows[sequence.stream % len(windows)])
    chosen: dict[tuple[int, int], list[Window]] = {group: [] for group in by_group}
    starts = 0
    for siblings in zip_longest(*by_group.values()):
        for own in siblings:
            if own is not None and starts < max_starts:
                chosen[group_of(own.sequence)].append(own)
                starts += own.rows
    return [window for own_windows in chosen.values() for window in own_windows]


class Measurement:
    """One model along some windows; `step` until `done`."""

    def __init__(self, model: Eagle3Model, windows: Sequence[Window]) -> None:
        self.model, self.windows = model, tuple(windows)
        self.seconds = 0.0
        self.counts: dict[tuple[int, int], tuple[int, int]] = {}  # starts and accepted drafts, by group
        self._waiting = list(windows)
        self._ready: Eagle3Model | None = None  # to be computed with

    @property
    def done(self) -> bool:
        """Nothing is left to measure."""
        return not self._waiting

    def step(self, settings: TrialSettings) -> None:
        """One more pass: the next window, and those of the same group that fit in with it."""
        began_s = time.perf_counter()
        starts = [self._waiting.pop(0)]
        group, rows = group_of(starts[0].sequence), starts[0].rows
        while self._waiting and group_of(self._waiting[0].sequence) == group:
            rows += self._waiting[0].rows
            if rows > settings.pass_rows:
                break
            starts.append(self._waiting.pop(0))
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


class PairedTrial(NamedTuple):
    """A candidate beside the drafter in use, on the same windows."""

    used: Measurement  # shared by the trials of one phase
    candidate: Measurement
    known_s: float  # seconds that `used` had taken before

    @classmethod
    def beside(cls, used: Measurement, model: Eagle3Model) -> "PairedTrial":
        """Of this candidate."""
        return cls(used, Measurement(model, used.windows), used.seconds)

    def step(self, settings: TrialSettings) -> None:
        """Measure a few more rows."""
        (self.candidate if self.used.done else self.used).step(settings)

    @property
    def done(self) -> bool:
        """Nothing is left to measure."""
        return self.used.done and self.candidate.done

    @property
    def seconds(self) -> float:
        """That this trial took."""
        return self.used.seconds - self.known_s + self.candidate.seconds

    def comparison(self) -> Comparison:
        """The outcome, when done."""
        assert self.used.counts.keys() == self.candidate.counts.keys(), "measured on the same windows"
        theirs = self.candidate.counts
        return Comparison.of(
            Group(starts, accepted, theirs[group][1]) for group, (starts, accepted) in self.used.counts.items()
        )


def _with_weights_in(model: Eagle3Model, dtype: torch.dtype) -> Eagle3Model:
    """The same results from less memory traffic: autocast would cast every weight anew in every product."""
    if dtype == torch.float32:
        return model
    cast = copy.deepcopy(model)
    for linear in cast.modules():
        if isinstance(linear, nn.Linear):
            linear.weight = nn.Parameter(linear.weight.detach().to(dtype), requires_grad=False)
    return cast
