"""What a worker needs of a rollout engine.  Our engine (`BuiltinReplica`) and vLLM (`vllm.client.VllmRollout`) have it.

A replica is a worker's copy of the policy that samples responses:

    load_weights -> decode -> report -> (release_memory, while the policy is trained) -> load_weights -> ...  close
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from tlt_core.items.speculation import RoundReport
from tlt_core.items.train_sequence import TrainSequence
from tlt_core.items.types import Rollout, SamplingParams
from tlt_core.rollout.engine import Pull, RoundTrace

OnCaptured = Callable[[TrainSequence], None]


class DecodeReport(NamedTuple):
    """What a replica has decoded since its last report."""

    rounds: tuple[RoundTrace, ...]
    tuner: dict[str, Any]  # `RecordedTuner.snapshot`; empty without a tuner
    drafter_failures: int  # proposals that could not be used, since the start


class Replica(Protocol):
    """One per worker, called from the worker's one thread."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, policy_version: int) -> None:
        """Replace the policy's weights; names and shapes as in `Decoder`."""

    def decode(
        self,
        pull: Pull,
        on_finish: Callable[[Rollout], None],
        params: SamplingParams,
        *,
        on_tokens: Callable[[int], None] = ...,
        on_round: Callable[[RoundReport], None] | None = None,
        on_captured: OnCaptured | None = None,
        worker: int = 0,
    ) -> None:
        """Decode until `pull` has nothing to give and every request has ended.  `pull(n)` returns up to n requests.

        on_finish: gets each response as it ends.  on_tokens: gets the number of tokens emitted, several times a second.
        on_round: gets what each round did.  on_captured: gets the hidden states of each response.
        """

    def report(self) -> DecodeReport:
        """What was decoded since the last report."""
        ...

    def release_memory(self) -> None:
        """Give back the memory of live requests until the next `decode`.  No request may be live."""

    def close(self) -> None:
        """End the engine.  A second call does nothing."""
