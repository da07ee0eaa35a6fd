"""One optimizer step of the policy on packed rollouts.

    for each micro-batch of this worker's share:   forward -> loss -> backward     (sums; see `loss`)
    all workers together:                          reduce gradients -> clip -> AdamW
    measurements of all micro-batches and workers: added up -> metrics

The back end holds the optimizer.  With several workers the caller initialises torch.distributed.
"""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from conf.optimizer import AdamWConfig
from conf.update import AlgorithmConfig, UpdateConfig
from tlt_core.grpo import trainer_files
from tlt_core.grpo.batch import TrainBatch
from tlt_core.grpo.lora import fuse_adapters, inject_adapters, merged_weights
from tlt_core.grpo.loss import LossTerms, TokenData, empty_sums, loss_metrics, policy_loss, token_weights
from tlt_core.grpo.micro_batch import MicroBatch, idle_micro_batch, micro_batches
from tlt_core.grpo.optimizer import learning_rate
from tlt_core.grpo.passes import skips_zero_advantage
from tlt_core.grpo.policy import PolicyModel, inputs_of, measure_logprobs
from tlt_core.grpo.torch_backend import TorchBackend
from tlt_core.items.store import is_finite
from tlt_core.machine.getting_on import got_on
from tlt_core.model.decoder import Decoder

if TYPE_CHECKING:
    from tlt_core.grpo.deepspeed_backend import DeepSpeedBackend

log = logging.getLogger(__name__)

_STEP = "step"  # in the saved state
_MOST_SKIPPED = 3  # optimizer steps in a row
_MOST_NAMED = 8  # responses in a message
# As in `exact_sum`, with multiples of 2^-36: below 2^17 these sums depend neither on the order nor on the workers.
_SHIFT = 1.5 * 2.0**16


class UpdateError(ValueError):
    """The update cannot go on.  The text names the remedy."""


@dataclass(slots=True)
class _StepSums:
    """What the passes of one optimizer step have measured so far; see `loss`."""

    sums_M: Tensor
    largest: Tensor
    finite: list[tuple[TrainBatch, MicroBatch, Tensor]] = field(default_factory=list)

    def add(self, terms: LossTerms, batch: TrainBatch, micro: MicroBatch) -> None:
        self.sums_M += (terms.sums_M + _SHIFT) - _SHIFT
        self.largest = torch.maximum(self.largest, terms.largest)
        self.finite.append((batch, micro, terms.finite_C))

    def not_finite(self) -> list[str]:
        """Responses with a term of the loss that is not finite."""
        bad = {
            (int(batch.prompt_ids_S[s]), int(batch.samples_S[s]))
            for batch, micro, finite_C in self.finite
            for s in micro.sequence_C[~finite_C.cpu()].tolist()
        }
        return [f"sample {sample} of prompt {prompt}" for prompt, sample in sorted(bad)]


class PolicyTrainer:
    """Trains one policy; one instance per worker, used in step with the others."""

    _backend: "TorchBackend | DeepSpeedBackend"

    def __init__(
        self,
        decoder: Decoder,
        cfg: UpdateConfig,
        *,
        algorithm: AlgorithmConfig,
        total_steps: int,
        max_new_tokens: int,
        temperature: float,
        rank: int,
        world_size: int,
        device: torch.device,
        optimizer: AdamWConfig | None = None,
    ) -> None:
        """decoder: on `device`, under ZeRO-3 on the CPU; its dtype is the compute dtype (masters are always float32).

        total_steps: optimizer steps of the run, for the schedule.  optimizer: replaces cfg.optimizer.
        """
        self.config = decoder.config
        self.completed_steps = 0
        self._skipped_in_row = 0
        self._cfg, self._algorithm = cfg, algorithm
        self._optimizer = optimizer or cfg.optimizer
        self._total_steps, self._max_new_tokens = total_steps, max_new_tokens
        self._rank, self._world_size, self._device = rank, world_size, device
        if cfg.lora.enabled:
            inject_adapters(decoder, cfg.lora)
        model = PolicyModel(decoder, temperature=temperature, activation_checkpointing=cfg.activation_checkpointing)
        self._decoder = decoder
        if cfg.backend.kind == "torch":
            fuse_adapters(decoder)
            self._backend = TorchBackend(model, self._optimizer, world_size=world_size)
        else:
            from tlt_core.grpo import deepspeed_backend  # seven seconds to import

            make = deepspeed_backend.DeepSpeedBackend
            self._backend = make(model, self._optimizer, cfg.backend, world_size=world_size, device=device)
        self._done = self._nothing_done()  # passes of the next optimizer step that were streamed

    def steps(self, batches: Sequence[TrainBatch]) -> dict[str, float]:
        """All optimizer steps of one RL step.  Metrics are means over the steps (learning rate: the last; maxima: the
        largest); there are none when no step was made because everything was masked out or skipped."""
        results = [metrics for batch in self._with_old_logprobs(batches) if (metrics := self.step(batch))]
        if not results:
            return {}
        merged = {name: sum(r[name] for r in results) / len(results) for name in results[0]}
        for name in merged:
            if name.endswith("_max"):
                merged[name] = max(r[name] for r in results)
        return merged | {"actor/lr": results[-1]["actor/lr"]}

    def step(self, batch: TrainBatch) -> dict[str, float]:
        """One optimizer step on this worker's share; metrics are the same on every worker.

        A step whose gradient is not finite is skipped: the policy stays as it is, the log names the responses, and
        there are no metrics.  Raises UpdateError when that happens three times in a row.
        """
        done, self._done = self._done, self._nothing_done()
        for micro in self._passes(batch, skip_zero_advantage=skips_zero_advantage(self._cfg, self._algorithm)):
            done.add(self._compute(batch, micro), batch, micro)
        scale = self._scale(batch)
        norm, lr = self._optimizer_step(scale)
        if not math.isfinite(norm):
            self._skip(norm, done.not_finite())
            return {}
        self._skipped_in_row = 0
        sums_M, largest = self._reduced(done.sums_M), self._reduced(done.largest, maximum=True)
        return loss_metrics(sums_M, largest, scale=scale) | {"actor/grad_norm": norm, "actor/lr": lr}

    def stream(self, batch: TrainBatch) -> None:
        """Add the gradient of one pass of the next optimizer step, which then leaves it out.  By one worker alone."""
        assert self._backend.sums_exactly, "the configuration refuses others"
        (micro,) = self._passes(batch, skip_zero_advantage=True)
        self._done.add(self._compute(batch, micro), batch, micro)

    def _compute(self, batch: TrainBatch, micro: MicroBatch) -> LossTerms:
        weights_S = token_weights(
            self._algorithm.loss_aggregation,
            batch.sampled_lens_S,
            num_tokens=self._planned_tokens(batch),
            num_sequences=batch.planned_sequences if self._backend.sums_exactly else batch.num_sequences,
            max_new_tokens=self._max_new_tokens,
        )
        with torch.set_grad_enabled(micro.needs_grad):
            logprobs_C, entropy_C = self._backend.forward(*inputs_of(micro, self._device))
            terms = policy_loss(logprobs_C, entropy_C, self._data(batch, micro, weights_S), algorithm=self._algorithm)
        if micro.needs_grad:
            self._backend.backward(terms.loss)
        return terms

    def _planned_tokens(self, batch: TrainBatch) -> int:
        return batch.planned_sequences * self._max_new_tokens if self._backend.sums_exactly else batch.num_tokens

    def _scale(self, batch: TrainBatch) -> float:
        """From planned to true counts: these are known only when every response has ended, so passes use the planned
        ones where the back end can scale the sum."""
        if not self._backend.sums_exactly:
            return 1.0
        if self._algorithm.loss_aggregation == "token_mean":
            return self._planned_tokens(batch) / batch.num_tokens
        return batch.planned_sequences / batch.num_sequences

    def _nothing_done(self) -> _StepSums:
        zero = torch.zeros((), dtype=torch.float64, device=self._device)
        return _StepSums(empty_sums().to(self._device), zero)

    def supervised_step(self, batch: TrainBatch) -> dict[str, float]:
        """One optimizer step on the mean cross-entropy of completion tokens.  The temperature applies here too: a
        supervised trainer is made with temperature 1.  Raises UpdateError when the gradient is not finite."""
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for micro in self._passes(batch, skip_zero_advantage=False):
            logprobs_C, _ = self._backend.forward(*inputs_of(micro, self._device))
            loss = -logprobs_C.sum() / batch.num_tokens
            self._backend.backward(loss)
            total += loss.detach()
        norm, _ = self._optimizer_step(1.0)
        if not math.isfinite(norm):
            raise UpdateError(
                f"the gradient norm is {norm} at supervised step {self.completed_steps}: the start model or the "
                "learning rate is unusable; lower coldstart.optimizer.learning_rate"
            )
        return {"coldstart/loss": float(self._reduced(total))}

    def logprobs(self, batch: TrainBatch) -> Tensor:
        """Log-probabilities of the share's completion tokens under the current policy, [C] float32 on the CPU."""
        passes = self._passes(batch, skip_zero_advantage=False)
        return measure_logprobs(self._backend.forward, passes, len(batch.rollout_logprobs_C), device=self._device)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight under the decoder's names, full, adapters merged, in the compute dtype.

        Consume it to the end on every worker: under ZeRO-3 gathering is a collective.  Items may be views of the live
        weights: copy them before the next step.  Raises UpdateError on a weight that is not finite.
        """
        named = ((name.removeprefix("decoder."), weight) for name, weight in self._backend.named_weights())
        for name, weight in merged_weights(self._decoder, named) if self._cfg.lora.enabled else named:
            if not is_finite(weight):
                raise UpdateError(_lost(f"weight {name}"))
            yield name, weight

    def state_dict(self) -> dict[str, Tensor]:
        """Everything that a resume needs, by parameter name, full on every worker: for models that fit so.  It fits any
        number of workers and either back end."""
        return dict(self._backend.named_state()) | {_STEP: torch.tensor(self.completed_steps)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on where `state_dict` was taken.  Raises UpdateError when it belongs to another model or is not finite."""
        shapes = self._backend.state_shapes()
        wrong = sorted(shapes.keys() ^ (state.keys() - {_STEP})) + [_STEP] * (_STEP not in state)
        for name in shapes.keys() & state.keys():
            value = state[name]
            if value.shape != shapes[name]:
                wrong.append(name)
            elif not is_finite(value):
                raise UpdateError(_lost(f"trainer state {name}"))
        if wrong:
            raise UpdateError(
                f"the saved trainer state does not fit the model ({len(wrong)} tensors, {wrong[0]!r} first): it was "
                "written by a run with another model or LoRA setting; resume with that configuration"
            )
        self.completed_steps = int(state[_STEP])
        self._backend.load_state(state, step=self.completed_steps)

    def save(self, folder: Path) -> None:
        """Write the trainer's part of a checkpoint: each worker a share, see `trainer_files`.  Raises UpdateError on a
        state that is not finite."""
        share = {_STEP: torch.tensor(self.completed_steps)} if self._rank == 0 else {}
        for number, (name, value) in enumerate(self._backend.named_state()):
            if not is_finite(value):
                raise UpdateError(_lost(f"trainer state {name}"))
            if number % self._world_size == self._rank:
                share[name] = value.cpu()
        trainer_files.write(folder, self._rank, share)

    def load(self, folder: Path) -> None:
        self.load_state_dict(trainer_files.SavedState(folder))

    def close(self) -> None:
        """Release the back end (for DeepSpeed, before the process group is destroyed)."""
        self._backend.close()

    def _with_old_logprobs(self, batches: Sequence[TrainBatch]) -> list[TrainBatch]:
        """With several optimizer steps the policy moves away from the one that sampled, so its log-probabilities are
        computed before the first.  With one, old and current policy are the same, and no extra pass is needed."""
        if len(batches) <= 1:
            return list(batches)
        once = {id(batch): batch for batch in batches}  # epochs repeat the same object
        done = {key: replace(batch, old_logprobs_C=self.logprobs(batch)) for key, batch in once.items()}
        return [done[id(batch)] for batch in batches]

    def _passes(self, batch: TrainBatch, *, skip_zero_advantage: bool) -> Iterator[MicroBatch]:
        budget = self._cfg.tokens_per_micro_batch
        passes = list(micro_batches(batch, token_budget=budget, skip_zero_advantage=skip_zero_advantage))
        missing = 0
        if self._backend.needs_equal_passes:
            most = self._reduced(torch.tensor(max(1, len(passes)), device=self._device), maximum=True)
            missing = int(most) - len(passes)
        for micro in (*passes, *(idle_micro_batch() for _ in range(missing))):
            yield micro
            got_on()

    def _data(self, batch: TrainBatch, micro: MicroBatch, weights_S: Tensor) -> TokenData:
        def pick(values_C: Tensor | None) -> Tensor | None:
            return None if values_C is None else values_C[micro.place_C].to(self._device)

        return TokenData(
            advantages_C=batch.advantages_S[micro.sequence_C].to(self._device),
            weights_C=weights_S[micro.sequence_C].to(self._device),
            rollout_logprobs_C=batch.rollout_logprobs_C[micro.place_C].to(self._device),
            old_logprobs_C=pick(batch.old_logprobs_C),
            ref_logprobs_C=pick(batch.ref_logprobs_C),
        )

    def _optimizer_step(self, scale: float) -> tuple[float, float]:
        """Norm of the gradient, and the learning rate.  Counted only where the norm is finite."""
        lr = learning_rate(self._optimizer, self.completed_steps, total_steps=self._total_steps)
        norm = self._backend.step(lr, scale)
        self.completed_steps += math.isfinite(norm)
        return norm, lr

    def _skip(self, norm: float, responses: list[str]) -> None:
        """Count and report a skipped step.  responses: of this worker's share, those without a finite loss."""
        if self._world_size > 1:
            shares: list[list[str]] = [[] for _ in range(self._world_size)]
            dist.all_gather_object(shares, responses)
            responses = [name for share in shares for name in share]
        self._skipped_in_row += 1
        more = f" and {len(responses) - _MOST_NAMED} more" if len(responses) > _MOST_NAMED else ""
        found = f"no finite loss for {', '.join(responses[:_MOST_NAMED])}{more}" if responses else "all losses finite"
        problem = f"the gradient norm is {norm} at optimizer step {self.completed_steps} ({found})"
        if self._skipped_in_row >= _MOST_SKIPPED:
            raise UpdateError(
                f"{problem}, the {_MOST_SKIPPED}. such step in a row: look at these responses and their rewards in the "
                "run's steps/ folder; if all responses are affected, the weights are lost: remove the newest "
                "checkpoint, and the run resumes from the one before"
            )
        if self._rank == 0:
            log.warning("%s: the step is skipped, the policy stays as it is", problem)

    def _reduced(self, values: Tensor, *, maximum: bool = False) -> Tensor:
        if self._world_size > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM)
        return values


def _lost(what: str) -> str:
    return (
        f"{what} holds NaN or infinite numbers, so the policy is lost; remove the newest checkpoint if it is the one "
        "that was loaded, and the run resumes from the one before"
    )
