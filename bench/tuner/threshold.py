"""The rule that serving engines offer, beside which the tuner's policies are judged."""

from collections.abc import Sequence

from tlt_core.items.speculation import OFF, Strategy
from tlt_core.tuner.policies import FixedTuner


class ThresholdTuner(FixedTuner):
    """The first strategy while at most `max_live` requests live, plain decoding above."""

    def __init__(self, strategies: Sequence[Strategy], *, max_live: int = 32) -> None:
        super().__init__(strategies)
        self._max_live = max_live

    def choose(self, rows: Sequence[int], context: int) -> Strategy:
        """See `Tuner`."""
        return OFF if len(rows) > self._max_live else super().choose(rows, context)
