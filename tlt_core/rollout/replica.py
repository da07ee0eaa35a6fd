"""What a worker needs of a rollout engine.  Our engine (`BuiltinReplica`) and vLLM (`vllm.client.VllmRollout`) have it.

A replica is a worker's copy of the policy that samples responses:

    load_weights -> decode -> report -> (release_memory, while the policy is trained) -> load_weights -> ...  close
"""

import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from tlt_core.items.speculation import RoundReport
from tlt_core.items.train_sequence import TrainSequence
from tlt_core.items.types import Rollout, SamplingParams
from tlt_core.rollout import build
from tlt_core.rollout.engine import Pull, RolloutEngine, RoundTrace

_POLL_S = 0.02  # how often a worker without an engine asks whether the engine on its GPU still decodes
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


class BuiltinReplica:
    """Keeps the rounds for the report, and the policy version that responses are marked with."""

    def __init__(self, engine: RolloutEngine, *, policy_version: int = 0) -> None:
        """policy_version: of the weights in the engine."""
        self._engine, self._policy_version = engine, policy_version
        self._rounds: list[RoundTrace] = []

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, policy_version: int) -> None:
        self._engine.load_weights(weights)
        self._policy_version = policy_version

    def decode(
        self,
        pull: Pull,
        on_finish: Callable[[Rollout], None],
        params: SamplingParams,
        *,
        on_tokens: Callable[[int], None] = lambda _: None,
        on_round: Callable[[RoundReport], None] | None = None,
        on_captured: OnCaptured | None = None,
        worker: int = 0,
    ) -> None:
        def hear(trace: RoundTrace) -> None:
            self._rounds.append(trace)
            if on_round is not None:
                on_round(trace.report)
            on_tokens(trace.tokens)

        self._engine.decode(
            pull,
            on_finish,
            params,
            on_round=hear,
            on_captured=on_captured,
            policy_version=self._policy_version,
            worker=worker,
        )

    def report(self) -> DecodeReport:
        rounds, self._rounds = tuple(self._rounds), []
        self._engine.forget_turns()
        return DecodeReport(rounds, build.snapshot(self._engine), sum(self._engine.drafter_failures.values()))

    def release_memory(self) -> None:
        self._engine.release_memory()

    def close(self) -> None:
        """Nothing to end: the engine lives in this process."""


class NoReplica:
    """Of a worker that decodes nothing: its GPU belongs to another worker's engine, or it only trains."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, policy_version: int) -> None:
        """Take them all: gathering them may need every worker."""
        for _ in weights:
            pass

    def decode(self, pull: Pull, on_finish: Callable[[Rollout], None], params: SamplingParams, **_: Any) -> None:
        """Ask for requests once.  There are none; the answer says whether it must ask again."""
        assert not pull(1), "requests go to workers that have an engine"
        time.sleep(_POLL_S)

    def report(self) -> DecodeReport:
        return DecodeReport((), {}, 0)

    def release_memory(self) -> None:
        """Nothing to release."""

    def close(self) -> None:
        """Nothing to end."""
