"""The replica of a worker that decodes nothing: its GPU belongs to another worker's engine, or it only trains."""

import time
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from tlt_core.items.types import Rollout, SamplingParams
from tlt_core.rollout.engine import Pull
from tlt_core.rollout.replica import DecodeReport

_POLL_S = 0.02  # how often it asks whether the engine on its GPU still decodes


class NoReplica:
    """A `Replica` without an engine."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, policy_version: int) -> None:
        """Take them all: gathering them may need every worker."""
        for _ in weights:
            pass

    def decode(self, pull: Pull, on_finish: Callable[[Rollout], None], params: SamplingParams, **_: Any) -> None:
        """Ask for requests once.  There are none; the answer says whether it must ask again."""
        assert not pull(1), "requests go to workers that have an engine"
        time.sleep(_POLL_S)

    def report(self) -> DecodeReport:
        """Nothing was decoded."""
        return DecodeReport((), {}, 0)

    def release_memory(self) -> None:
        """Nothing to release."""

    def close(self) -> None:
        """Nothing to end."""
