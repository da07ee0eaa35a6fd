"""One worker's part in training the drafter: hidden states in, bounded pieces of work, a measured candidate out.

    collect(captured) -> buffer -> sampler -> micro_step, micro_step, ... (idle time) -> result -> adopt(published)

A micro-step is one of: gradients of a few windows, an optimizer step, a part of the canary.  Gradients take
`micro_step_s` at most, as the ones before were timed, a part of the canary 128 chains.  Gradients, order and canary
outlive an interruption: nothing is lost but the piece under way, and gradients under way are given up within a fraction
of their time.

A candidate is the average of the weights over the optimizer steps (Polyak and Juditsky, 1992; with a decay, because
the policy moves): a step has few tokens, so the newest weights are noisy.  The canary (`spot_canary`) drafts along
held-back recent responses, with the drafter in use and with the candidate, and compares what is accepted.  So whether
it may be published is known when rollout ends, at no cost to anybody.  Where phases are short the canary goes on from
one to the next: begun anew in each, it would never end.

Hidden states are those of the policy that sampled the response.  This step's responses and the long ones of the steps
before, those of other workers too (`spot/peers`), are mixed ("one-step offset", TLT section 4).
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from conf.schema import SpotConfig
from tlt_core.drafter.eagle3_loss import LossKind
from tlt_core.drafter.eagle3_model import Eagle3Model
from tlt_core.drafter.eagle3_sequence import HeadProbs, TrainSequence
from tlt_core.drafter.eagle3_train import Eagle3Trainer, GivenUp, Method, TrainSettings
from tlt_core.drafter.eagle3_windows import Window
from tlt_core.model.decoder import Decoder
from tlt_core.rollout.capture import Captured
from tlt_core.spot.buffer import SequenceBuffer, StoredSequence
from tlt_core.spot.checkpoint import SpotCheckpoint, SpotCheckpointError, async_checkpoint, load_checkpoint
from tlt_core.spot.comparison import Comparison
from tlt_core.spot.peers import PeerFiles
from tlt_core.spot.sampling import Candidate, WindowRef, WindowSampler
from tlt_core.spot.writer import BackgroundWriter, WriteError
from tlt_core.spot_canary import ChainSettings, HeldWindow, Measurement, compare, held_windows
from tlt_core.types import SamplingParams

log = logging.getLogger(__name__)

_STATE = "training.safetensors"
_FIRST_ROWS = 16  # of the first micro-step, before anything was timed
_LEAST_ROWS = 4
ENOUGH = 0.75  # of a step's rows: where the next window does not fit, a pass over a piece of it costs almost as much
_CANARY_ROWS = 128  # chains of a part of the canary, which is not given up
_FASTEST = 2.0  # change of a micro-step's size from one to the next
_CANARY_EVERY = 4.0  # seconds of training for each second that a candidate's trial takes


class SpotResult(NamedTuple):
    """What one worker's training amounts to when a rollout has ended."""

    rows: int = 0  # tokens trained on in this phase
    steps: int = 0  # optimizer steps in this phase
    steps_total: int = 0
    loss: float = 0.0  # mean of this phase
    overlap: float = 0.0  # probability that the first draft is accepted, mean of this phase
    top1: float = 0.0  # share of rows where it is the policy's likeliest token, mean of this phase
    canary: Comparison | None = None  # of the newest measured weights with the drafter in use; None: none was measured
    buffer_tokens: int = 0
    buffer_sequences: int = 0


class _Trial(NamedTuple):
    """A candidate beside the drafter in use, on the same held-back responses."""

    held: list[HeldWindow]
    used: Measurement
    candidate: Measurement
    known_s: float  # seconds that `used` had taken before

    def step(self, chains: ChainSettings) -> None:
        """Measure a few more held-back rows."""
        (self.candidate if self.used.done else self.used).step(chains)

    @property
    def done(self) -> bool:
        """Nothing is left to measure."""
        return self.used.done and self.candidate.done


@dataclass(slots=True)
class _Phase:
    """What a new rollout resets."""

    trial: _Trial | None = None  # the newest that is done; others of the phase are measured on the same responses
    nothing_held: bool = False
    candidate: Eagle3Model | None = None  # of that trial, as long as it may be published
    comparison: Comparison | None = None
    rows: int = 0
    steps: int = 0
    loss: float = 0.0  # sums over rows
    overlap: float = 0.0
    top1: float = 0.0


class SpotTraining:
    """See the module docstring.  Owned by a worker; called from its one thread."""

    def __init__(
        self,
        cfg: SpotConfig,
        *,
        model: Eagle3Model,
        decoder: Decoder,
        depth: int,
        temperature: float,
        compute_dtype: torch.dtype,
        folder: Path,
        resume: bool,
        peers: Sequence[Path] = (),
        method: Method = "eagle3",
        loss: LossKind = "soft_ce",
    ) -> None:
        """model: float32, the drafter in use, which becomes this object's.  depth: of the training-time test, and of
        the canary's chains.  compute_dtype: of both; the decoder has its own.  folder: where hidden states and training
        state are kept; others may read there.  resume: go on from what is there.  peers: other workers' folders."""
        self._cfg = cfg
        self._decoder, self._folder = decoder, folder
        self._writer = BackgroundWriter()
        self._settings = TrainSettings(
            learning_rate=cfg.learning_rate,
            depth=depth,
            compute_dtype=compute_dtype,
            method=method,
            loss=loss,
        )
        self.used = _copy(model)
        self._chains = ChainSettings(
            decoder.embed_tokens.weight,
            depth,
            SamplingParams(temperature=temperature),
            self._settings.compute_dtype,
            pass_rows=_CANARY_ROWS,
        )
        self._trial: _Trial | None = None  # under way
        self._measured_steps = 0  # the trainer's, when the latest candidate was taken
        self._trained_s = 0.0  # since then
        self._trial_s = 0.0  # that the latest trial took
        self._trainer = Eagle3Trainer(model, decoder.embed_tokens.weight, self._settings)
        self._average = _copy(model)  # of the trainer's weights, over its steps: the candidate
        self._sent_N = _flat(model)  # memory for what is published: the first touch of it takes ten times the copying
        self._sampler = WindowSampler(window_rows=cfg.window_rows, length_bias=cfg.length_bias, recency=cfg.recency)
        self._drawn: list[WindowRef] = []  # whose gradients were given up
        self._given_up = 0  # times in a row
        self._heads: dict[int, Tensor] = {}  # rows of the target's head for the draft vocabulary, by policy version
        self._stored: dict[str, StoredSequence] | None = None
        self._policy_version = 0
        self._wanted_rows = float(_FIRST_ROWS)  # of a micro-step
        self._peers = PeerFiles(peers)
        self._more_of_peers = False
        self._step = 0
        self._rejections = 0
        self._phase = _Phase()
        saved = self._load() if resume else None
        # What an earlier run left in the folder goes, unless it is resumed.
        index: dict[str, Any] = {"files": []} if saved is None else saved.values["buffer"]
        self._buffer = SequenceBuffer.open(
            folder,
            index,
            max_bytes=cfg.max_buffer_mb << 20,
            max_ram_bytes=cfg.max_ram_mb << 20,
            max_sequences=cfg.max_sequences,
            writer=self._writer,
        )
        if saved is not None:
            self._resume(saved)

    # ------------------------------------------------------------------------------------------ rollout

    def begin(self, step: int, policy_version: int) -> None:
        """A rollout phase begins, with this policy in the decoder."""
        self._step, self._policy_version = step, policy_version
        if policy_version not in self._heads:
            self._heads[policy_version] = self._in_training_type(self._decoder.head_weight[self.used.draft_ids_J])
        self._phase = _Phase()
        self._stored = None

    def collect(self, captured: Captured) -> None:
        """Keep a finished response."""
        if len(captured.tokens_L) - captured.first >= 2:  # one sampled token alone trains nothing
            self._buffer.add(_stored(captured, self._step))
            self._stored = None

    def end(self) -> None:
        """The step's responses are complete: they go to disk in the background."""
        self._buffer.spill(self._step)
        kept = (*self._buffer.sequences(), *self._peers.sequences())
        alive = {item.policy_version for item in kept} | {self._policy_version}
        self._heads = {version: head for version, head in self._heads.items() if version in alive}

    # ------------------------------------------------------------------------------------------ idle time

    @property
    def has_data(self) -> bool:
        """Is there anything to train on?"""
        return bool(self._trainable())

    def micro_step(self, given_up: Callable[[], bool] = lambda: False, *, longest_s: float = math.inf) -> bool:
        """One bounded piece of work.  There must be data.

        given_up: asked now and then whether the time is wanted back.  If so gradients that are under way are dropped,
        to be made of the same windows next time (of part of them where that has happened before), and False is
        returned.  longest_s: a bound below `micro_step_s`, where nobody would ask for the time in between.
        """
        phase, began_s = self._phase, time.perf_counter()
        if self._trial is not None:
            self._continue_trial(self._trial)
        elif self._trainer.rows >= ENOUGH * self._cfg.rows_per_step:
            self._trainer.apply()
            _move(self._average, self._trainer.model, 1 - self._cfg.average_decay)
            phase.steps += 1
            self._trained_s += time.perf_counter() - began_s
        elif self._candidate_due():
            self._trial = self._next_trial()
            phase.nothing_held = self._trial is None
        else:
            done = self._train(given_up, longest_s)
            self._trained_s += time.perf_counter() - began_s
            return done
        return True

    def result(self) -> SpotResult:
        """What came of the phase so far."""
        return SpotResult(
            rows=self._phase.rows,
            steps=self._phase.steps,
            steps_total=self._trainer.steps,
            loss=self._phase.loss / max(1, self._phase.rows),
            overlap=self._phase.overlap / max(1, self._phase.rows),
            top1=self._phase.top1 / max(1, self._phase.rows),
            canary=self._phase.comparison,
            buffer_tokens=self._buffer.tokens,
            buffer_sequences=len(self._buffer),
        )

    # ------------------------------------------------------------------------------------------ publish

    def contribution(self, share: float) -> Tensor:
        """The measured candidate's parameters, times its share of what is published; one float32 vector, valid until
        the next call of this or of `room`."""
        assert share == 0 or self._phase.candidate is not None, "only a measured candidate has a share"
        model = self.used if self._phase.candidate is None else self._phase.candidate
        parameters_N = _flat(model, out=self._sent_N)
        return parameters_N if share == 1 else parameters_N.mul_(share)

    def room(self) -> Tensor:
        """The same memory, for another worker's `contribution`."""
        return self._sent_N

    def canary_of(self, parameters_N: Tensor) -> Comparison:
        """These weights against those in use, on what this worker has held back; nothing where it has not trained."""
        trial = self._phase.trial
        if trial is None:
            return Comparison()
        model = _copy(self.used)
        _fill(model, parameters_N)
        candidate = Measurement(model, trial.held)
        while not candidate.done:
            candidate.step(self._chains)
        return compare(trial.used, candidate)

    def adopt(self, parameters_N: Tensor, *, is_mine: bool) -> Eagle3Model:
        """These weights are in use from now on.  is_mine: they are this worker's own candidate, whose training goes
        on where it is; others start from the published weights."""
        _fill(self.used, parameters_N)
        if not is_mine:
            _fill(self._trainer.model, parameters_N)
            _fill(self._average, parameters_N)
            self._measured_steps = self._trainer.steps
        self._phase.candidate, self._rejections = None, 0
        self._phase.trial = self._trial = None  # beside a drafter that is not in use any more
        return self.used

    def reject(self) -> bool:
        """The candidate was refused.  True: too often, so training starts again from the drafter in use."""
        self._rejections += 1
        self._phase.candidate = None
        if self._rejections < self._cfg.max_rejections:
            return False
        model = _copy(self.used).requires_grad_(True)
        self._trainer = Eagle3Trainer(model, self._decoder.embed_tokens.weight, self._settings)
        self._average = _copy(model)
        self._rejections = self._measured_steps = 0
        self._trial = None
        return True

    # ------------------------------------------------------------------------------------------ restarts

    @property
    def checksum(self) -> int:
        """Of the drafter in use, bit by bit; equal on all workers."""
        flat = [p.detach().flatten() for p in self.used.parameters()]
        words = [x.view(torch.int32 if len(x) % 2 else torch.int64) for x in flat]  # pairs take a quarter of the time
        return sum(int(x.sum(dtype=torch.int64)) for x in words)

    def save(self) -> None:
        """What a restart needs, in the background: trained parameters, optimizer, heads, and the index of the hidden
        states, which are files already.  The drafter in use is part of the run's checkpoint."""
        tensors = self._trainer.state_dict() | {f"head.{version}": head for version, head in self._heads.items()}
        tensors |= {f"average.{name}": value.clone() for name, value in self._average.state_dict().items()}
        values = {
            "step": self._step,
            "rejections": self._rejections,
            "measured_steps": self._measured_steps,
            "trained_s": self._trained_s,
            "trial_s": self._trial_s,
            "wanted_rows": self._wanted_rows,
            "buffer": self._buffer.index(),
            "sampler": self._sampler.state_dict(),
            "drawn": self._drawn,
            "given_up": self._given_up,
        }
        try:
            async_checkpoint(self._writer, self._folder / _STATE, tensors, values)
        except WriteError as error:  # an earlier one; its file was the drafter's alone
            log.warning("the drafter's training state could not be saved: %s", error)

    def close(self) -> None:
        """Wait for what is being written."""
        try:
            self._writer.close()
        except WriteError as error:
            log.warning("the drafter's training state could not be saved: %s", error)

    def _load(self) -> SpotCheckpoint | None:
        if not (self._folder / _STATE).is_file():
            return None
        try:
            return load_checkpoint(self._folder / _STATE)
        except SpotCheckpointError as error:
            log.warning("%s; the drafter's training starts anew", error)
            return None

    def _resume(self, saved: SpotCheckpoint) -> None:
        tensors, values = saved
        heads = {int(n.removeprefix("head.")): h for n, h in tensors.items() if n.startswith("head.")}
        self._heads = {version: self._in_training_type(head) for version, head in heads.items()}
        average = {n.removeprefix("average."): v for n, v in tensors.items() if n.startswith("average.")}
        self._trainer.load_state_dict({n: v for n, v in tensors.items() if not n.startswith(("head.", "average."))})
        self._average.load_state_dict(average or self._trainer.model.state_dict())  # absent from older states
        self._step, self._rejections = values["step"], values["rejections"]
        self._measured_steps, self._wanted_rows = values.get("measured_steps", 0), values["wanted_rows"]
        # Absent from older states.  Without them each restart would begin with a trial.
        self._trained_s, self._trial_s = values.get("trained_s", 0.0), values.get("trial_s", 0.0)
        self._sampler.load_state_dict(values["sampler"])
        self._drawn = [WindowRef(*ref) for ref in values.get("drawn", [])]  # absent from older states
        self._given_up = values.get("given_up", 0)

    # ------------------------------------------------------------------------------------------ inside

    def _train(self, given_up: Callable[[], bool], longest_s: float) -> bool:
        """Gradients of some windows; False: given up."""
        stored = self._trainable()
        self._drawn = [ref for ref in self._drawn if ref.id in stored]
        if not self._drawn:
            wanted = self._wanted_rows * min(1.0, longest_s / self._cfg.micro_step_s)
            self._drawn = self._sampler.next(max(1, min(int(wanted), self._cfg.rows_per_step - self._trainer.rows)))
        chosen, rest = self._divided()
        windows = []
        for ref in chosen:
            sequence = self._sequence(stored[ref.id])
            windows.append(Window(sequence, sequence.earliest + ref.start, sequence.earliest + ref.end))
        began_s = time.perf_counter()
        try:
            metrics = self._trainer.accumulate(windows, given_up=given_up)
        except GivenUp:
            self._given_up += 1
            return False
        self._drawn, self._given_up = rest, 0
        self._resize(metrics.rows, time.perf_counter() - began_s)
        self._phase.rows += metrics.rows
        self._phase.loss += metrics.loss * metrics.rows
        self._phase.overlap += metrics.overlaps[0] * metrics.rows
        self._phase.top1 += metrics.top1 * metrics.rows
        return True

    def _divided(self) -> tuple[list[WindowRef], list[WindowRef]]:
        """What of the windows drawn goes into the next pass, and what is left: all of them do, unless they were given
        up twice and more.  Where idle time is always shorter than such a pass, nothing would ever be learnt."""
        room = sum(ref.end - ref.start for ref in self._drawn)
        if self._given_up >= 2:
            room = max(room >> self._given_up - 1, _LEAST_ROWS)
        chosen, rest = list[WindowRef](), list[WindowRef]()
        for ref in self._drawn:
            cut = min(ref.start + room, ref.end)
            room -= cut - ref.start
            chosen += [ref._replace(end=cut)] if cut > ref.start else []
            rest += [ref._replace(start=cut)] if cut < ref.end else []
        return chosen, rest

    def _trainable(self) -> dict[str, StoredSequence]:
        """What the sampler chooses from, by id; gathered anew when something came in."""
        if self._stored is None or self._more_of_peers:
            self._more_of_peers = self._peers.look(self._step)
            others = (item for item in self._peers.trainable(self._step) if item.policy_version in self._heads)
            self._stored = {item.id: item for item in (*others, *self._buffer.trainable())}
            candidates = [Candidate(name, _rows(item), item.step) for name, item in self._stored.items()]
            self._sampler.refresh(candidates, self._step)
        return self._stored

    def _resize(self, rows: int, seconds: float) -> None:
        """The next micro-step's size, so that it takes `micro_step_s`.  A pass has a fixed cost, so a rate measured on
        small ones would keep them small; one that was cut short says nothing of larger ones."""
        factor = min(max(self._cfg.micro_step_s / seconds, 1 / _FASTEST), _FASTEST)
        if factor < 1 or rows > self._wanted_rows / _FASTEST:
            self._wanted_rows = min(max(self._wanted_rows * factor, _LEAST_ROWS), float(self._cfg.rows_per_step))

    def _candidate_due(self) -> bool:
        """A trial pays when training since the last one, this phase or before, has taken longer than that did, several
        times."""
        if self._phase.nothing_held or self._trainer.steps == self._measured_steps:
            return False
        return self._trained_s > _CANARY_EVERY * self._trial_s

    def _next_trial(self) -> _Trial | None:
        """Of the newest weights; None: nothing is held back.  The drafter in use is measured once a phase."""
        known = self._phase.trial
        held = self._choose_held() if known is None else known.held
        if not held:
            return None
        used = Measurement(self.used, held) if known is None else known.used
        self._measured_steps, self._trained_s = self._trainer.steps, 0.0
        return _Trial(held, used, Measurement(_copy(self._average), held), known_s=used.seconds)

    def _choose_held(self) -> list[HeldWindow]:
        """What trials are measured on."""
        held = (((item.step, item.key.prompt_id), self._sequence(item)) for item in self._buffer.held())
        return held_windows(held, rows=_CANARY_ROWS, max_starts=self._cfg.canary_tokens)

    def _continue_trial(self, trial: _Trial) -> None:
        trial.step(self._chains)
        if not trial.done:
            return
        self._trial, self._phase.trial = None, trial
        self._trial_s = trial.used.seconds - trial.known_s + trial.candidate.seconds
        self._phase.candidate, self._phase.comparison = trial.candidate.model, compare(trial.used, trial.candidate)

    def _in_training_type(self, head_JD: Tensor) -> Tensor:
        """A copy: products with it take as long as training's own."""
        return head_JD.detach().to(self._settings.compute_dtype, copy=True)

    def _sequence(self, item: StoredSequence) -> TrainSequence:
        probs = HeadProbs(item.last_PD, item.lognorms_P, self._heads[item.policy_version])
        return TrainSequence(item.tokens_L.long(), item.taps_LE, probs, item.first, item.stream)


def _stored(captured: Captured, step: int) -> StoredSequence:
    return StoredSequence(step=step, **captured._asdict())


def _rows(item: StoredSequence) -> int:
    """Trained rows, as `TrainSequence.rows` counts them."""
    return len(item.tokens_L) - 2 - max(item.first - 2, 0)


def _copy(model: Eagle3Model) -> Eagle3Model:
    copied = Eagle3Model(model.config)
    copied.tap_scales = model.tap_scales
    copied.load_state_dict(model.state_dict())
    return copied.requires_grad_(False)


@torch.no_grad()
def _move(model: Eagle3Model, target: Eagle3Model, share: float) -> None:
    """Each weight goes so much of the way to the target's."""
    torch._foreach_lerp_(list(model.parameters()), list(target.parameters()), share)


@torch.no_grad()
def _flat(model: Eagle3Model, *, out: Tensor | None = None) -> Tensor:
    """All parameters as one vector."""
    return torch.cat([p.flatten() for p in model.parameters()], out=out)


@torch.no_grad()
def _fill(model: Eagle3Model, parameters_N: Tensor) -> None:
    sizes = [p.numel() for p in model.parameters()]
    for parameter, values in zip(model.parameters(), parameters_N.split(sizes), strict=True):
        parameter.copy_(values.view_as(parameter))
