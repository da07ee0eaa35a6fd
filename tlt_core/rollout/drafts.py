"""What an engine speculates with, as a worker's `cluster/drafting` sees it: ours (`BuiltinDrafts`) or vLLM's
(`vllm/drafts.VllmDrafts`)."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from tlt_core.drafter.eagle3.drafter import Eagle3Drafter
from tlt_core.items.speculation import Strategy
from tlt_core.model.decoder import Decoder
from tlt_core.model.edge_weights import EdgeWeights
from tlt_core.rollout import build
from tlt_core.rollout.engine import RolloutEngine, Speculation
from tlt_core.tuner.policies import UNKNOWN, RecordedTuner


class TunerControl(Protocol):
    """Events from outside that a tuner must know of, between two rounds; see `RecordedTuner`."""

    def notify_change(self, drafter: str | None = None, *, change: float = UNKNOWN) -> None:
        """New weights."""

    def suspend(self, drafter: str) -> None:
        """It has collapsed."""

    def resume(self, drafter: str) -> None:
        """It may draft again."""

    def state_dict(self) -> Mapping[str, Any]:
        """As JSON values."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what `state_dict` returned."""


class Drafts(Protocol):
    """See the module docstring."""

    policy: str  # of the tuner
    strategies: Sequence[Strategy]
    learned: Sequence[str]  # drafters that learn from the policy's hidden states

    @property
    def tuner(self) -> TunerControl | None:
        """None where nothing is to be tuned."""

    @property
    def edge_weights(self) -> Decoder | EdgeWeights | None:
        """Embedding and head of the policy in the engine; None where no drafter is trained."""

    def calibrate(self) -> None:
        """Measure costs before the first round, where that is possible."""

    def load_drafter(self, weights: Mapping[str, Tensor]) -> None:
        """Draft with these weights of the learned drafter from now on; names as in an exported file."""


class BuiltinDrafts:
    """Those of our engine."""

    def __init__(self, engine: RolloutEngine, speculation: Speculation) -> None:
        self._engine, self._drafters = engine, speculation.drafters
        self.strategies: Sequence[Strategy] = speculation.strategies
        self.policy = type(speculation.tuner).__name__
        self.tuner = speculation.tuner if isinstance(speculation.tuner, RecordedTuner) else None
        self.learned: Sequence[str] = [name for name, drafter in speculation.drafters.items() if drafter.taps]
        self.edge_weights = engine.decoder

    def calibrate(self) -> None:
        """As `Drafts.calibrate`."""
        build.calibrate(self._engine)

    def load_drafter(self, weights: Mapping[str, Tensor]) -> None:
        """As `Drafts.load_drafter`, in place.  Raises RuntimeError if that has changed the policy."""
        drafter = self._drafters[self.learned[0]]
        assert isinstance(drafter, Eagle3Drafter), "the one kind that idle workers train"
        shared = _distinct((self.edge_weights.head_weight, self.edge_weights.embed_tokens.weight))
        before = [_checksum(weight) for weight in shared]
        drafter.load_weights(dict(weights))
        if [_checksum(weight) for weight in shared] != before:
            raise RuntimeError("new weights of the drafter have changed the policy's: stop and report this")


def _distinct(weights: Iterable[Tensor]) -> list[Tensor]:
    return list({weight.data_ptr(): weight for weight in weights}.values())


def _checksum(weight: Tensor) -> int:
    """Of every 61st row: cheap, and a push that overwrites a shared tensor changes them all."""
    return int(weight[::61].contiguous().view(torch.uint8).sum(dtype=torch.int64))
