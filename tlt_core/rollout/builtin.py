"""Our engine as a worker's replica (see `replica.Replica`)."""

from collections.abc import Callable, Iterable

from torch import Tensor

from tlt_core.items.speculation import RoundReport
from tlt_core.items.types import Rollout, SamplingParams
from tlt_core.rollout import build
from tlt_core.rollout.engine import Pull, RolloutEngine, RoundTrace
from tlt_core.rollout.replica import DecodeReport, OnCaptured


class BuiltinReplica:
    """Keeps the rounds for the report, and the policy version that responses are marked with."""

    def __init__(self, engine: RolloutEngine, *, policy_version: int = 0) -> None:
        """policy_version: of the weights in the engine."""
        self._engine, self._policy_version = engine, policy_version
        self._rounds: list[RoundTrace] = []

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, policy_version: int) -> None:
        """As `Replica.load_weights`, in place."""
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
        """As `Replica.decode`."""

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
        """As `Replica.report`."""
        rounds, self._rounds = tuple(self._rounds), []
        return DecodeReport(rounds, build.snapshot(self._engine), sum(self._engine.drafter_failures.values()))

    def release_memory(self) -> None:
        """As `Replica.release_memory`."""
        self._engine.release_memory()

    def close(self) -> None:
        """Nothing to end: the engine lives in this process."""
