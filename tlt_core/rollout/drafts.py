"""What an engine speculates with, as a worker's `cluster/drafting` sees it: ours, or vLLM's."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from tlt_core.drafter.eagle3.drafter import Eagle3Drafter
from tlt_core.items.speculation import Strategy
from tlt_core.rollout import build
from tlt_core.rollout.engine import RolloutEngine, Speculation
from tlt_core.rollout.vllm.drafts import VllmDrafts
from tlt_core.tuner.policies import RecordedTuner


class BuiltinDrafts:
    """Those of our engine.

    policy: of the tuner.  tuner: None where nothing is to be tuned.  learned: drafters that learn from the policy's
    hidden states.  edge_weights: has embedding and head of the policy in the engine.
    """

    def __init__(self, engine: RolloutEngine, speculation: Speculation) -> None:
        self._engine, self._drafters = engine, speculation.drafters
        self.strategies: Sequence[Strategy] = speculation.strategies
        self.policy = type(speculation.tuner).__name__
        self.tuner = speculation.tuner if isinstance(speculation.tuner, RecordedTuner) else None
        self.learned: Sequence[str] = [name for name, drafter in speculation.drafters.items() if drafter.taps]
        self.edge_weights = engine.decoder

    def calibrate(self) -> None:
        """Measure costs before the first round."""
        build.calibrate(self._engine)

    def load_drafter(self, weights: Mapping[str, Tensor]) -> None:
        """Draft with these weights of the learned drafter from now on; names as in an exported file.  In place."""
        drafter = self._drafters[self.learned[0]]
        assert isinstance(drafter, Eagle3Drafter), "the one kind that idle workers train"
        drafter.load_weights(dict(weights))


Drafts = BuiltinDrafts | VllmDrafts
