"""Training of the drafter in idle time (TLT section 4, "spot trainer"): a worker trains while it has nothing to decode.

    rollout --collect--> curriculum --windows--> micro_step, micro_step, ... (idle time) --> candidate --> publish

A micro-step is one of: gradients of a few windows, an optimizer step, a piece of a candidate's trial.  When rollout
ends, the micro-step under way is finished; gradients, order and trial go on in the next idle time.

A candidate is the average of the weights over the optimizer steps (Polyak and Juditsky, 1992; with a decay, because the
policy moves): a step has few tokens, so the newest weights are noisy.

Hidden states are those of the policy that sampled the response.  This step's responses are mixed with long ones of the
steps before, of other workers too ("one-step offset", TLT section 4).
"""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from conf.drafter import IdleTrainingConfig
from tlt_core.drafter.eagle3.model import Eagle3Model
from tlt_core.drafter.eagle3.train import Eagle3Trainer, TrainMetrics, TrainSettings
from tlt_core.drafter.eagle3.weights import copy_of, fill
from tlt_core.idle_training.buffer import SequenceBuffer
from tlt_core.idle_training.candidate import DrafterCandidate, TrialSettings
from tlt_core.idle_training.checkpoint import IdleTrainingCheckpoint, TrainingCheckpoint
from tlt_core.idle_training.comparison import Comparison
from tlt_core.idle_training.curriculum import Curriculum
from tlt_core.items.train_sequence import TrainSequence
from tlt_core.items.types import SamplingParams
from tlt_core.model.decoder import Decoder
from tlt_core.model.edge_weights import EdgeWeights

_ENOUGH = 0.75  # of a step's rows: where the next window does not fit, a pass over a piece of it costs almost as much


class IdleTrainingResult(NamedTuple):
    """What one worker's training amounts to when a rollout has ended."""

    rows: int = 0  # tokens trained on in this phase
    steps: int = 0  # optimizer steps in this phase
    steps_total: int = 0
    loss: float = 0.0  # mean of this phase
    overlap: float = 0.0  # probability that the first draft is accepted, mean of this phase
    top1: float = 0.0  # share of rows where it is the policy's likeliest token, mean of this phase
    trial: Comparison | None = None  # of the newest candidate with the drafter in use; None: there was no trial
    buffer_tokens: int = 0
    buffer_sequences: int = 0


class IdleTraining:
    """See the module docstring.  Owned by a worker; called from its one thread."""

    def __init__(
        self,
        cfg: IdleTrainingConfig,
        *,
        model: Eagle3Model,
        target: Decoder | EdgeWeights,
        depth: int,
        temperature: float,
        compute_dtype: torch.dtype,
        folder: Path,
        resume: bool,
        peers: Sequence[Path] = (),
    ) -> None:
        """model: float32, the drafter in use, which becomes this object's.  depth: of the training-time test and of a
        trial's chains.  target: whose embedding and head are those of the policy in the engine, on the same device.
        compute_dtype: of training and trials.  folder: where hidden states and training state are kept; others may read
        there.  resume: go on from what is there; else it is cleared.  peers: other workers' folders."""
        self._cfg, self._target = cfg, target
        self._settings = TrainSettings(
            learning_rate=cfg.learning_rate, depth=depth, compute_dtype=compute_dtype, loss=cfg.loss
        )
        self._heads: dict[int, Tensor] = {}  # the draft vocabulary's rows of the LM head, by policy version
        self._policy_version = self._step = self._rejections = 0
        self._passes: list[TrainMetrics] = []  # of this phase
        self._updates = 0  # in this phase
        writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="idle-training-writer")
        self._checkpoint = TrainingCheckpoint(folder, writer)
        saved = self._checkpoint.load() if resume else None
        self._buffer = SequenceBuffer(
            folder,
            index=None if saved is None else saved.values["buffer"],
            max_bytes=cfg.max_buffer_mb << 20,
            max_sequences=cfg.max_sequences,
            writer=writer,
        )
        self._curriculum = Curriculum(cfg, self._buffer, peers, self._heads)
        params = SamplingParams(temperature=temperature)
        trials = TrialSettings(target.embed_tokens.weight, depth, params, compute_dtype)
        self.candidate = DrafterCandidate(copy_of(model), trials, max_starts=cfg.canary_tokens)
        self._learn_from(model)
        if saved is not None:
            self._resume(saved)

    def _learn_from(self, model: Eagle3Model) -> None:
        self._trainer = Eagle3Trainer(model, self._target, self._settings, heads=self._heads)
        self._average = copy_of(model)  # of the trainer's weights, over its steps

    def begin(self, step: int, policy_version: int) -> None:
        """A rollout phase begins, with this policy in the engine."""
        self._step, self._policy_version = step, policy_version
        self._passes, self._updates = [], 0
        if policy_version not in self._heads:
            self._keep_head(policy_version, self._target.head_weight[self.candidate.used.draft_ids_J])
        self.candidate.begin_phase()
        self._curriculum.begin_phase(step)

    def collect(self, sequence: TrainSequence) -> None:
        """Keep a finished response."""
        if len(sequence.tokens_L) - sequence.first >= 2:  # one sampled token alone trains nothing
            self._curriculum.add(sequence)

    def end(self) -> None:
        """The step's responses are complete: they go to disk in the background."""
        self._buffer.end_step(self._step)
        for version in self._heads.keys() - self._curriculum.versions() - {self._policy_version}:
            del self._heads[version]

    @property
    def has_data(self) -> bool:
        """Is there anything to train on?"""
        return bool(self._curriculum.sequences())

    def micro_step(self) -> None:
        """One bounded piece of work.  There must be data."""
        if self.candidate.in_trial:
            self.candidate.continue_trial()
        elif self._trainer.rows < _ENOUGH * self._cfg.rows_per_step and self.candidate.is_due(self._trainer.steps):
            self.candidate.start_trial(self._average, self._trainer.steps, self._buffer.held)
        else:
            began_s = time.perf_counter()
            self._train()
            self.candidate.trained(time.perf_counter() - began_s)

    def _train(self) -> None:
        """An optimizer step, or gradients of some windows."""
        if self._trainer.rows >= _ENOUGH * self._cfg.rows_per_step:
            self._trainer.apply()
            with torch.no_grad():
                average: list[Tensor] = list(self._average.parameters())
                newest: list[Tensor] = list(self._trainer.model.parameters())
                torch._foreach_lerp_(average, newest, 1 - self._cfg.average_decay)
            self._updates += 1
            return
        windows = self._curriculum.next(room=self._cfg.rows_per_step - self._trainer.rows)
        began_s = time.perf_counter()
        metrics = self._trainer.accumulate(windows)
        self._curriculum.trained(metrics.rows, time.perf_counter() - began_s)
        self._passes.append(metrics)

    def result(self) -> IdleTrainingResult:
        """What came of the phase so far."""
        rows = sum(m.rows for m in self._passes)
        return IdleTrainingResult(
            rows=rows,
            steps=self._updates,
            steps_total=self._trainer.steps,
            loss=sum(m.loss * m.rows for m in self._passes) / max(1, rows),
            overlap=sum(m.overlaps[0] * m.rows for m in self._passes) / max(1, rows),
            top1=sum(m.top1 * m.rows for m in self._passes) / max(1, rows),
            trial=self.candidate.comparison,
            buffer_tokens=self._buffer.tokens,
            buffer_sequences=len(self._buffer),
        )

    def adopt(self, parameters_N: Tensor, *, is_mine: bool) -> Eagle3Model:
        """These weights are in use from now on.  is_mine: they are this worker's own candidate, whose training goes
        on where it is; others start from the published weights."""
        self.candidate.adopt(parameters_N)
        self._rejections = 0
        if not is_mine:
            fill(self._trainer.model, parameters_N)
            fill(self._average, parameters_N)
            self.candidate.restart(self._trainer.steps)
        return self.candidate.used

    def reject(self) -> bool:
        """The candidate was refused.  True: too often, so training starts again from the drafter in use."""
        self._rejections += 1
        if self._rejections < self._cfg.max_rejections:
            return False
        self._learn_from(copy_of(self.candidate.used).requires_grad_(True))
        self.candidate.restart(0)
        self._rejections = 0
        return True

    def save(self) -> None:
        """Write what a restart needs, in the background.  Hidden states are files already, and the drafter in use is
        part of the run's checkpoint."""
        self._checkpoint.save(
            {
                "step": self._step,
                "rejections": self._rejections,
                "buffer": self._buffer.index(),
                "curriculum": self._curriculum.state_dict(),
                "candidate": self.candidate.state_dict(),
            },
            trainer=self._trainer.state_dict(),
            average={name: value.clone() for name, value in self._average.state_dict().items()},
            heads={str(version): head for version, head in self._heads.items()},
        )

    def close(self) -> None:
        """Wait for what is being written."""
        self._checkpoint.close()

    def _resume(self, saved: IdleTrainingCheckpoint) -> None:
        for version, head in saved.part("heads").items():
            self._keep_head(int(version), head)
        self._trainer.load_state_dict(saved.part("trainer"))
        self._average.load_state_dict(saved.part("average"))
        self._step, self._rejections = saved.values["step"], saved.values["rejections"]
        self._curriculum.load_state_dict(saved.values["curriculum"])
        self.candidate.load_state_dict(saved.values["candidate"])

    def _keep_head(self, policy_version: int, head_JD: Tensor) -> None:
        """A copy in the type of training, whose products take less time."""
        device = self._target.head_weight.device
        self._heads[policy_version] = head_JD.detach().to(device, self._settings.compute_dtype, copy=True)
