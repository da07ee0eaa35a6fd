"""One optimizer step of the policy on packed rollouts.

    for each micro-batch of this worker's share:   forward -> loss -> backward     (sums; see `loss`)
    all workers together:                          reduce gradients -> clip -> AdamW
    measurements of all micro-batches and workers: added up -> metrics

The same machinery trains on worked solutions (`supervised_step`).  Who holds the optimizer is the back end's business.
torch.distributed is initialised by the caller where there is more than one worker.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from conf.schema import AdamWConfig, AlgorithmConfig, UpdateConfig
from tlt_core.grpo.batch import TrainBatch, skips_zero_advantage
from tlt_core.grpo.lora import inject_adapters, merged_weights
from tlt_core.grpo.loss import TokenData, empty_sums, loss_metrics, policy_loss, token_weights
from tlt_core.grpo.micro_batch import MicroBatch, idle_micro_batch, micro_batches
from tlt_core.grpo.optimizer import learning_rate
from tlt_core.grpo.policy import PolicyModel, inputs_of, measure_logprobs
from tlt_core.grpo.torch_backend import TorchBackend
from tlt_core.model.decoder import Decoder

_STATE_FILE = "trainer.safetensors"


class UpdateError(ValueError):
    """The update cannot go on.  The text names the remedy."""


class Backend(Protocol):
    """Who holds the optimizer.  All workers call every method together."""

    needs_equal_passes: bool  # forward and backward are collectives: every worker must make as many passes

    def forward(self, *inputs: Tensor | None) -> tuple[Tensor, Tensor]: ...
    def backward(self, loss: Tensor) -> None: ...
    def step(self, lr: float) -> float: ...
    def named_weights(self) -> Iterator[tuple[str, Tensor]]: ...
    def state_dict(self) -> dict[str, Tensor]: ...
    def load_state_dict(self, state: dict[str, Tensor], *, step: int) -> None: ...
    def close(self) -> None: ...


class PolicyTrainer:
    """Trains one policy; one instance per worker, used in step with the others."""

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
        """decoder: on `device`; its dtype is the compute dtype (masters are float32 in any case).

        total_steps: optimizer steps of the run, for the schedule.  optimizer: used in place of cfg.optimizer.
        """
        self.config = decoder.config
        self.completed_steps = 0
        self._cfg, self._algorithm = cfg, algorithm
        self._optimizer = optimizer or cfg.optimizer
        self._total_steps, self._max_new_tokens = total_steps, max_new_tokens
        self._rank, self._world_size, self._device = rank, world_size, device
        if cfg.lora.enabled:
            inject_adapters(decoder, cfg.lora)
        model = PolicyModel(decoder, temperature=temperature, activation_checkpointing=cfg.activation_checkpointing)
        self._decoder = decoder
        self._backend = self._make_backend(model)

    def _make_backend(self, model: PolicyModel) -> Backend:
        if self._cfg.backend.kind == "torch":
            return TorchBackend(model, self._optimizer, world_size=self._world_size)
        from tlt_core.grpo.deepspeed_backend import DeepSpeedBackend  # seven seconds to import

        return DeepSpeedBackend(model, self._optimizer, self._cfg.backend, world_size=self._world_size)

    # ------------------------------------------------------------------------------------------ training

    def steps(self, batches: Sequence[TrainBatch]) -> dict[str, float]:
        """All optimizer steps of one RL step.  Metrics are means over them (learning rate: the last; maxima: the
        largest).  No batches (everything was masked out): no step, no metrics."""
        results = [self.step(batch) for batch in self._with_old_logprobs(batches)]
        metrics = {name: sum(r[name] for r in results) / len(results) for name in (results[0] if results else ())}
        for name in metrics:
            if name.endswith("_max"):
                metrics[name] = max(r[name] for r in results)
        return metrics | ({"actor/lr": results[-1]["actor/lr"]} if results else {})

    def step(self, batch: TrainBatch) -> dict[str, float]:
        """One optimizer step on this worker's share; metrics are the same on every worker."""
        algorithm = self._algorithm
        weights_S = token_weights(
            algorithm.loss_aggregation,
            batch.response_lens_S,
            num_tokens=batch.num_tokens,
            num_sequences=batch.num_sequences,
            max_new_tokens=self._max_new_tokens,
        )
        sums_M, largest = empty_sums().to(self._device), torch.zeros((), dtype=torch.float64, device=self._device)
        for micro in self._passes(batch, skip_zero_advantage=skips_zero_advantage(self._cfg, algorithm)):
            with torch.set_grad_enabled(micro.needs_grad):
                logprobs_C, entropy_C = self._backend.forward(*inputs_of(micro, self._device))
                terms = policy_loss(logprobs_C, entropy_C, self._data(batch, micro, weights_S), algorithm=algorithm)
            if micro.needs_grad:
                self._backend.backward(terms.loss)
            sums_M += terms.sums_M
            largest = torch.maximum(largest, terms.largest)
        optimizer_metrics = self._finish_step()
        return loss_metrics(self._reduced(sums_M), self._reduced(largest, maximum=True)) | optimizer_metrics

    def supervised_step(self, batch: TrainBatch) -> dict[str, float]:
        """One optimizer step on the mean cross-entropy of completion tokens.  The temperature applies here too: a
        supervised trainer is made with temperature 1."""
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for micro in self._passes(batch, skip_zero_advantage=False):
            logprobs_C, _ = self._backend.forward(*inputs_of(micro, self._device))
            loss = -logprobs_C.sum() / batch.num_tokens
            self._backend.backward(loss)
            total += loss.detach()
        optimizer_metrics = {k.replace("actor/", "coldstart/"): v for k, v in self._finish_step().items()}
        return {"coldstart/loss": float(self._reduced(total))} | optimizer_metrics

    def logprobs(self, batch: TrainBatch) -> Tensor:
        """Log-probabilities of the share's completion tokens under the current policy, [C] float32 on the CPU."""
        passes = self._passes(batch, skip_zero_advantage=False)
        count = len(batch.rollout_logprobs_C)
        return measure_logprobs(self._backend.forward, passes, count, device=self._device)

    # ------------------------------------------------------------------------------------------ state

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight under the decoder's names, full, adapters merged, in the compute dtype.

        Consume it to the end on every worker: under ZeRO-3 gathering is a collective.  Items may be views of the live
        weights: copy them before the next step.
        """
        prefix = "decoder."
        named = ((name.removeprefix(prefix), weight) for name, weight in self._backend.named_weights())
        return merged_weights(self._decoder, named) if self._cfg.lora.enabled else named

    def state_dict(self) -> dict[str, Tensor]:
        """Everything a resume needs, by parameter name, full on every worker: it fits any number of workers and
        either back end."""
        return self._backend.state_dict() | {"step": torch.tensor(self.completed_steps)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on where `state_dict` was taken.  Raises UpdateError when it belongs to another model."""
        own = self._backend.state_dict()
        wrong = [n for n in own if n not in state or state[n].shape != own[n].shape] + sorted(
            set(state) - set(own) - {"step"}
        )
        if wrong:
            raise UpdateError(
                f"the saved trainer state does not fit the model ({len(wrong)} tensors, {wrong[0]!r} first): it was "
                "written by a run with another model or LoRA setting; resume with that configuration"
            )
        self.completed_steps = int(state["step"])
        self._backend.load_state_dict(state, step=self.completed_steps)

    def save(self, folder: Path) -> None:
        """Write the trainer's part of a checkpoint: rank 0 writes, all take part in gathering."""
        state = self.state_dict()
        if self._rank == 0:
            save_file(state, folder / _STATE_FILE)

    def load(self, folder: Path) -> None:
        """Read what `save` wrote, on every worker."""
        self.load_state_dict(load_file(folder / _STATE_FILE))

    def close(self) -> None:
        """Release the back end (DeepSpeed needs it before the process group goes)."""
        self._backend.close()

    # ------------------------------------------------------------------------------------------ inside

    def _with_old_logprobs(self, batches: Sequence[TrainBatch]) -> list[TrainBatch]:
        """With several optimizer steps the policy moves away from the one that sampled: remember its log-probs.  With
        one step old and current policy are the same, and no extra pass is made."""
        if len(batches) <= 1:
            return list(batches)
        done = {id(batch): batch for batch in batches}  # epochs repeat the same object
        done = {key: batch.with_old_logprobs(self.logprobs(batch)) for key, batch in done.items()}
        return [done[id(batch)] for batch in batches]

    def _passes(self, batch: TrainBatch, *, skip_zero_advantage: bool) -> Iterator[MicroBatch]:
        budget = self._cfg.tokens_per_micro_batch
        passes = list(micro_batches(batch, token_budget=budget, skip_zero_advantage=skip_zero_advantage))
        missing = 0
        if self._backend.needs_equal_passes:
            most = self._reduced(torch.tensor(max(1, len(passes)), device=self._device), maximum=True)
            missing = int(most) - len(passes)
        yield from passes
        for _ in range(missing):
            yield idle_micro_batch()

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

    def _finish_step(self) -> dict[str, float]:
        lr = learning_rate(self._optimizer, self.completed_steps, total_steps=self._total_steps)
        norm = self._backend.step(lr)
        if not math.isfinite(norm):
            raise UpdateError(
                f"the gradient norm is {norm} at optimizer step {self.completed_steps}: the policy is lost; resume "
                f"from the newest checkpoint with a lower learning rate (now {lr:.2e})"
            )
        self.completed_steps += 1
        return {"actor/grad_norm": norm, "actor/lr": lr}

    def _reduced(self, values: Tensor, *, maximum: bool = False) -> Tensor:
        if self._world_size > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM)
        return values
