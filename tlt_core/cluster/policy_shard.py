"""One worker's share of the policy update: the trainer, and the reference model where the loss needs one."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from tlt_core.cluster.messages import TrainerSpec, UpdateReport
from tlt_core.grpo.batch import TrainBatch
from tlt_core.grpo.policy import FrozenPolicy
from tlt_core.grpo.update import PolicyTrainer
from tlt_core.items.types import WorkerSpan, WorkerState
from tlt_core.machine.precision import as_torch
from tlt_core.model.decoder import Decoder
from tlt_core.model.load import load_decoder, save_hf


class PolicyShard:
    """One per worker.  All workers call every method together, unless it says otherwise."""

    def __init__(
        self,
        spec: TrainerSpec,
        *,
        model_dir: Path,
        checkpoint: Path | None,
        device: torch.device,
        rank: int,
        world_size: int,
    ) -> None:
        """model_dir: the model that RL starts from.  checkpoint: where the policy goes on from, if anywhere."""
        self._rank = rank

        def start_model(where: torch.device) -> Decoder:
            return load_decoder(model_dir, dtype=as_torch(spec.update.dtype), device=where)

        self._trainer = PolicyTrainer(
            start_model(torch.device("cpu") if spec.update.shards_weights else device),
            spec.update,
            algorithm=spec.algorithm,
            total_steps=spec.total_steps,
            max_new_tokens=spec.max_new_tokens,
            temperature=spec.temperature,
            rank=rank,
            world_size=world_size,
            device=device,
        )
        if checkpoint is not None:
            self._trainer.load(checkpoint)
        self._reference: FrozenPolicy | None = None
        if spec.algorithm.kl.coef > 0:
            self._reference = FrozenPolicy(
                start_model(device),
                temperature=spec.temperature,
                token_budget=spec.update.tokens_per_micro_batch,
                device=device,
            )

    def update(self, steps: Sequence[TrainBatch]) -> UpdateReport:
        """One RL step's optimizer steps, on this worker's share of each."""
        started_s = time.time()
        metrics = self._trainer.steps(steps)
        return UpdateReport((WorkerSpan(self._rank, WorkerState.UPDATING, started_s, time.time()),), metrics)

    def stream(self, share: TrainBatch) -> None:
        """See `PolicyTrainer.stream`.  By one worker alone."""
        self._trainer.stream(share)

    def supervised_step(self, batch: TrainBatch) -> dict[str, float]:
        """One step of supervised training (the cold start)."""
        return self._trainer.supervised_step(batch)

    def reference_logprobs(self, batch: TrainBatch) -> Tensor:
        """Log-probs of the share's tokens under the model that RL started from."""
        assert self._reference is not None, "loaded only when algorithm.kl.coef > 0"
        return self._reference.logprobs(batch)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The policy's weights by name, gathered from all workers."""
        return self._trainer.weights()

    def save(self, folder: Path) -> None:
        """Write this worker's part of a checkpoint."""
        self._trainer.save(folder)

    def export(self, out_dir: Path, *, tokenizer_from: Path, dtype: str) -> None:
        """Write the policy as a plain Hugging Face folder: rank 0 writes, all take part in gathering."""
        weights = self._trainer.weights()
        if self._rank == 0:
            save_hf(weights, self._trainer.config, out_dir, tokenizer_from=tokenizer_from, dtype=as_torch(dtype))
        else:
            for _ in weights:
                pass

    def close(self) -> None:
        """Release what the trainer holds in the process group."""
        self._trainer.close()
