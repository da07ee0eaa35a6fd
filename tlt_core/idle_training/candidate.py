"""The drafter in use, and the candidate that may take its place.

    trained weights --start_trial--> candidate --continue_trial, piece by piece--> comparison --> adopt, or withdraw

A candidate is tried in idle time, so when rollout ends it is known whether it may be published.  Trials cost training
time: one begins when training since the last one took several times as long as that.  Where idle time is short, a trial
goes on in the next phase.
"""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from tlt_core.drafter.eagle3.model import Eagle3Model
from tlt_core.drafter.eagle3.weights import checksum, copy_of, fill, flat
from tlt_core.idle_training.comparison import Comparison
from tlt_core.idle_training.trial import Measurement, PairedTrial, TrialSettings, trial_windows
from tlt_core.items.train_sequence import TrainSequence

_TRAINING_PER_TRIAL = 4.0  # seconds of training for each second that a trial takes


class DrafterCandidate:
    """See the module docstring."""

    def __init__(self, used: Eagle3Model, settings: TrialSettings, *, max_starts: int) -> None:
        """max_starts: held-back rows of a trial."""
        self.used = used
        self.comparison: Comparison | None = None  # outcome of the phase's latest trial
        self._settings, self._max_starts = settings, max_starts
        self._sent_N = flat(used)  # memory for what is published: its first touch takes ten times as long as a copy
        self._model: Eagle3Model | None = None  # tried in this phase, and may be published
        self._trial: PairedTrial | None = None  # under way
        self._done: PairedTrial | None = None  # the phase's latest; later ones use the same responses
        self._nothing_held = False
        self._tried_steps = 0  # the trainer's, when the latest candidate was taken
        self._trained_s = 0.0  # since then
        self._trial_s = 0.0  # that the latest trial took

    def begin_phase(self) -> None:
        """A trial under way goes on; outcomes of the phase before are void."""
        self._done = self._model = self.comparison = None
        self._nothing_held = False

    # ------------------------------------------------------------------------------------------ trial

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
            used = Measurement(
                self.used, trial_windows(held(), rows=self._settings.pass_rows, max_starts=self._max_starts)
            )
        else:
            used = self._done.used
        self._nothing_held = not used.windows
        if used.windows:
            self._tried_steps, self._trained_s = steps, 0.0
            self._trial = PairedTrial.beside(used, copy_of(weights))

    @property
    def in_trial(self) -> bool:
        """Is a trial under way?"""
        return self._trial is not None

    def continue_trial(self) -> None:
        """Measure one more piece."""
        trial = self._trial
        assert trial is not None, "start_trial comes first"
        trial.step(self._settings)
        if trial.done:
            self._trial, self._done, self._trial_s = None, trial, trial.seconds
            self._model, self.comparison = trial.candidate.model, trial.comparison()

    # ------------------------------------------------------------------------------------------ publish

    def contribution(self, share: float) -> Tensor:
        """The candidate's parameters, times its share of what is published; one float32 vector, valid until the next
        call of this or of `room`."""
        assert share == 0 or self._model is not None, "only a candidate after its trial has a share"
        parameters_N = flat(self.used if self._model is None else self._model, out=self._sent_N)
        return parameters_N if share == 1 else parameters_N.mul_(share)

    def room(self) -> Tensor:
        """The same memory, for another worker's `contribution`."""
        return self._sent_N

    def compare(self, parameters_N: Tensor) -> Comparison:
        """These weights with those in use, on the responses of this phase's trial; empty where there was none."""
        if self._done is None:
            return Comparison()
        model = copy_of(self.used)
        fill(model, parameters_N)
        trial = PairedTrial.beside(self._done.used, model)
        while not trial.done:
            trial.step(self._settings)
        return trial.comparison()

    def adopt(self, parameters_N: Tensor) -> None:
        """These weights are in use from now on; trials beside the old ones are void."""
        fill(self.used, parameters_N)
        self._model = self._done = self._trial = None

    def withdraw(self) -> None:
        """The candidate was refused."""
        self._model = None

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
