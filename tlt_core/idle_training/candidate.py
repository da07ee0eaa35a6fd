"""The drafter in use, and the candidate that may take its place.

    trained weights --start_trial--> candidate --continue_trial, piece by piece--> comparison --> adopt

A candidate is tried in idle time, so when rollout ends it is known whether it may be published.  Trials cost training
time: one begins when training since the last one took several times as long as that.  Where idle time is short, a trial
goes on in the next phase.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tlt_core.drafter.eagle3.acceptance import start_runs
from tlt_core.drafter.eagle3.model import Eagle3Model
from tlt_core.drafter.eagle3.weights import checksum, copy_of, fill, flat
from tlt_core.drafter.eagle3.windows import Window, cut
from tlt_core.idle_training.comparison import Comparison, Group
from tlt_core.items.train_sequence import TrainSequence
from tlt_core.items.types import SamplingParams

_TRAINING_PER_TRIAL = 4.0  # seconds of training for each second that a trial takes

Counts = dict[tuple[int, int], tuple[int, int]]  # starts of chains and accepted drafts, by step and prompt


class TrialSettings(NamedTuple):
    """How chains are drafted."""

    embedding_VD: Tensor
    depth: int
    params: SamplingParams
    compute_dtype: torch.dtype
    pass_rows: int = 128  # rows of a window, and of the windows of one pass, at most: a pass is not interrupted


def group_of(sequence: TrainSequence) -> tuple[int, int]:
    """Step and prompt."""
    return sequence.step, sequence.key.prompt_id


def trial_windows(held: Iterable[TrainSequence], *, rows: int, max_starts: int) -> list[Window]:
    """One window of `rows` rows at most of each response, group by group, as many as reach max_starts.

    A response has one window at most, so that a long one does not outvote the others.  The first response of every
    group comes before the second of any, because groups count as independent.  The window of a long response is chosen
    by its noise stream: at random, but always the same.
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


class Trial:
    """What a candidate and the drafter in use get accepted along the same windows; `step` until `done`.

    Chains are drafted from every row of a window, with the response's own noise: exactly what the engine's chains would
    have had accepted there.
    """

    def __init__(
        self,
        used: Eagle3Model,
        candidate: Eagle3Model,
        windows: Sequence[Window],
        settings: TrialSettings,
        *,
        known: Counts | None = None,
    ) -> None:
        """known: counts of the drafter in use along these windows; None: they are measured first."""
        self.candidate, self.windows, self._settings = candidate, tuple(windows), settings
        self.used_counts, self._counts = known or {}, Counts()
        measured = [(candidate, self._counts)] if known else [(used, self.used_counts), (candidate, self._counts)]
        passes = list(_passes(windows, rows=settings.pass_rows))
        self._waiting = deque((model, counts, starts) for model, counts in measured for starts in passes)
        self.seconds = 0.0  # that this trial took

    @property
    def done(self) -> bool:
        """Nothing is left to measure."""
        return not self._waiting

    def step(self) -> None:
        """Measure one more pass."""
        began_s, settings = time.perf_counter(), self._settings
        model, counts, starts = self._waiting.popleft()
        runs = start_runs(
            model,
            settings.embedding_VD,
            starts,
            depth=settings.depth,
            params=settings.params,
            compute_dtype=settings.compute_dtype,
        )
        group = group_of(starts[0].sequence)
        known, accepted = counts.get(group, (0, 0))
        counts[group] = known + sum(map(len, runs)), accepted + int(torch.cat(runs).sum())
        self.seconds += time.perf_counter() - began_s

    def comparison(self) -> Comparison:
        """The outcome, when done."""
        return Comparison.of(
            Group(starts, accepted, self._counts[group][1]) for group, (starts, accepted) in self.used_counts.items()
        )


def _passes(windows: Sequence[Window], *, rows: int) -> Iterator[list[Window]]:
    """Windows of one group that fit into a pass together; one that is too long is a pass of its own."""
    part: list[Window] = []
    for window in windows:
        alike = part and group_of(part[0].sequence) == group_of(window.sequence)
        if part and not (alike and sum(w.rows for w in part) + window.rows <= rows):
            yield part
            part = []
        part.append(window)
    if part:
        yield part


class DrafterCandidate:
    """See the module docstring."""

    def __init__(self, used: Eagle3Model, settings: TrialSettings, *, max_starts: int) -> None:
        """max_starts: held-back rows of a trial."""
        self.used = used
        self.comparison: Comparison | None = None  # outcome of the phase's latest trial
        self._settings, self._max_starts = settings, max_starts
        self._model: Eagle3Model | None = None  # tried in this phase, and may be published
        self._trial: Trial | None = None  # under way
        self._done: Trial | None = None  # the phase's latest; later ones use the same responses
        self._nothing_held = False
        self._tried_steps = 0  # the trainer's, when the latest candidate was taken
        self._trained_s = 0.0  # since then
        self._trial_s = 0.0  # that the latest trial took

    def begin_phase(self) -> None:
        """A trial under way goes on; outcomes of the phase before are void."""
        self._done = self._model = self.comparison = None
        self._nothing_held = False

    def trained(self, seconds: float) -> None:
        """Training went on for so long."""
        self._trained_s += seconds

    def is_due(self, steps: int) -> bool:
        """Is it time for a trial?  steps: the trainer's so far."""
        if self._nothing_held or steps == self._tried_steps:
            return False
        return self._trained_s > _TRAINING_PER_TRIAL * self._trial_s

    def start_trial(self, weights: Eagle3Model, steps: int, held: Callable[[], Iterable[TrainSequence]]) -> None:
        """Take a copy of these weights as candidate.  held: responses held back from training."""
        if self._done is None:
            windows = trial_windows(held(), rows=self._settings.pass_rows, max_starts=self._max_starts)
            self._nothing_held = not windows
            if not windows:
                return
            self._trial = Trial(self.used, copy_of(weights), windows, self._settings)
        else:
            self._trial = self._beside(self._done, copy_of(weights))
        self._tried_steps, self._trained_s = steps, 0.0

    @property
    def in_trial(self) -> bool:
        """Is a trial under way?"""
        return self._trial is not None

    def continue_trial(self) -> None:
        """Measure one more piece."""
        trial = self._trial
        assert trial is not None, "start_trial comes first"
        trial.step()
        if trial.done:
            self._trial, self._done, self._trial_s = None, trial, trial.seconds
            self._model, self.comparison = trial.candidate, trial.comparison()

    def contribution(self, share: float) -> Tensor:
        """The candidate's parameters, times its share of what is published; one float32 vector."""
        assert share == 0 or self._model is not None, "only a candidate after its trial has a share"
        return flat(self.used if self._model is None else self._model).mul_(share)

    def compare(self, parameters_N: Tensor) -> Comparison:
        """These weights with those in use, on the responses of this phase's trial; empty where there was none."""
        if self._done is None:
            return Comparison()
        model = copy_of(self.used)
        fill(model, parameters_N)
        trial = self._beside(self._done, model)
        while not trial.done:
            trial.step()
        return trial.comparison()

    def adopt(self, parameters_N: Tensor) -> None:
        """These weights are in use from now on; trials beside the old ones are void."""
        fill(self.used, parameters_N)
        self._model = self._done = self._trial = None

    def restart(self, steps: int) -> None:
        """Training begins anew: nothing is on trial, and there is nothing new since these steps of the trainer."""
        self._trial, self._tried_steps = None, steps

    @property
    def checksum(self) -> int:
        """Of the drafter in use, bit by bit; equal on all workers."""
        return checksum(self.used)

    def state_dict(self) -> dict[str, Any]:
        """When the next trial is due, as JSON values.  A trial under way is not part of it."""
        return {"tried_steps": self._tried_steps, "trained_s": self._trained_s, "trial_s": self._trial_s}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`."""
        self._tried_steps, self._trained_s, self._trial_s = state["tried_steps"], state["trained_s"], state["trial_s"]

    def _beside(self, done: Trial, model: Eagle3Model) -> Trial:
        """The same trial of another model."""
        return Trial(self.used, model, done.windows, self._settings, known=done.used_counts)
