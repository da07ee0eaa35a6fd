"""What the passes of one optimizer step have measured so far."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tlt_core.grpo.batch import TrainBatch
from tlt_core.grpo.loss import LossTerms
from tlt_core.grpo.micro_batch import MicroBatch

# As in `exact_sum`, with multiples of 2^-36: below 2^17 these sums depend neither on the order nor on the workers.
_SHIFT = 1.5 * 2.0**16


@dataclass(slots=True)
class StepSums:
    """Sums over passes; see `loss`."""

    sums_M: Tensor
    largest: Tensor
    finite: list[tuple[TrainBatch, MicroBatch, Tensor]] = field(default_factory=list)

    def add(self, terms: LossTerms, batch: TrainBatch, micro: MicroBatch) -> None:
        """One pass more."""
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
