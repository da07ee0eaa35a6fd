"""What a worker needs of a rollout engine.  Our engine (`own.OwnReplica`) and vLLM (`vllm.client.VllmRollout`) have it.

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


class SpecCounters(NamedTuple):
    """vLLM's counters of speculative decoding.  SpecCounters(2, 6, 4, (2, 1, 1)): two chains of three, four accepted"""

    drafts: int  # chains drafted, one per request and round
    draft_tokens: int
    accepted: int
    accepted_per_pos: tuple[int, ...]  # entry i: chains of which at least i + 1 tokens were accepted

    def __sub__(self, earlier: "SpecCounters") -> "SpecCounters":
        """What was counted since."""
        before = earlier.accepted_per_pos or (0,) * len(self.accepted_per_pos)
        return SpecCounters(
            self.drafts - earlier.drafts,
            self.draft_tokens - earlier.draft_tokens,
            self.accepted - earlier.accepted,
            tuple(now - then for now, then in zip(self.accepted_per_pos, before, strict=True)),
        )


class DecodeReport(NamedTuple):
    """What a replica has decoded since its last report."""

    rounds: tuple[RoundTrace, ...]  # empty for vLLM, which does not report rounds
    tuner: dict[str, Any]  # `RecordedTuner.snapshot`; empty without a tuner
    drafter_failures: int  # proposals that could not be used, since the start
    chains: SpecCounters | None = None  # vLLM's counters


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
        on_round: gets what each round did; vLLM does not call it.  on_captured: gets the hidden states of each
        response; only our engine has them.
        """

    def report(self) -> DecodeReport:
        """What was decoded since the last report."""
        ...

    def release_memory(self) -> None:
        """Give back the memory of live requests until the next `decode`.  No request may be live."""

    def close(self) -> None:
        """End the engine.  A second call does nothing."""
