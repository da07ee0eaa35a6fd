"""One worker's share of the policy update: the trainer, and the reference model where the loss needs one."""

import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
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

_SAMPLES = 64  # values of each tensor; all of them would be read for seconds


class PolicyShard:
    """One per worker.  All workers call every method together."""

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

        self.trainer = PolicyTrainer(
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
            self.trainer.load(checkpoint)
        self._reference: FrozenPolicy | None = None
        if spec.algorithm.kl.coef > 0:
            self._reference = FrozenPolicy(
                start_model(device),
                temperature=spec.temperature,
                token_budget=spec.update.tokens_per_micro_batch,
                device=device,
            )

    def update(self, steps: Sequence[TrainBatch]) -> UpdateReport:
        started_s = time.time()
        metrics = self.trainer.steps(steps)
        return UpdateReport((WorkerSpan(self._rank, WorkerState.UPDATING, started_s, time.time()),), metrics)

    def reference_logprobs(self, batch: TrainBatch) -> Tensor:
        """Log-probs of the share's tokens under the model that RL started from."""
        assert self._reference is not None, "loaded only when algorithm.kl.coef > 0"
        return self._reference.logprobs(batch)

    def export(self, out_dir: Path, *, tokenizer_from: Path, dtype: str) -> None:
        """Write the policy as a plain Hugging Face folder: rank 0 writes, all take part in gathering."""
        weights = self.trainer.weights()
        if self._rank == 0:
            save_hf(weights, self.trainer.config, out_dir, tokenizer_from=tokenizer_from, dtype=as_torch(dtype))
        else:
            for _ in weights:
                pass


class WeightDigest:
    """Fingerprint of weights on their way into an engine, from a strided sample of each tensor."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._samples: list[Tensor] = []

    def through(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The same names and tensors."""
        for name, tensor in weights:
            flat = tensor.detach().reshape(-1)
            self._names.append(f"{name} {tuple(tensor.shape)} {tensor.dtype}")
            self._samples.append(flat[:: max(1, len(flat) // _SAMPLES)].clone().view(torch.uint8))
            yield name, tensor

    @property
    def value(self) -> int:
        """A 32-bit checksum of everything that went through; it depends on the order of the tensors."""
        names = zlib.crc32("\n".join(self._names).encode())
        return zlib.crc32(torch.cat(self._samples).cpu().numpy().tobytes(), names)
