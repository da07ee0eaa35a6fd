"""A worker's side of the dispatcher: requests in, finished rollouts and reports out."""

import time
from collections.abc import Sequence
from typing import Any

import ray

from tlt_core.cluster.dispatcher import OfferedPass
from tlt_core.idle_training.coordinator import Order, Progress
from tlt_core.items.types import GenerationRequest, Rollout
from tlt_core.machine.getting_on import got_on

_REPORT_S = 0.5  # how often a busy worker reports its token count


class RequestFeed:
    """One per worker and rollout phase.  Only `pull`, `flush`, `ask` and `take` wait for the dispatcher."""

    def __init__(self, dispatcher: Any, worker: int) -> None:
        """dispatcher: handle of the Ray actor."""
        self._dispatcher, self._worker = dispatcher, worker
        self._pushed: list[Any] = []
        self._tokens, self._reported_s = 0, time.monotonic()
        self.exhausted = False  # no request is left for this worker in this phase

    def pull(self, wanted: int) -> Sequence[GenerationRequest]:
        """Up to `wanted` requests."""
        if self.exhausted:
            return ()
        requests, self.exhausted = ray.get(self._dispatcher.pull.remote(self._worker, wanted))
        return requests

    def push(self, rollout: Rollout) -> None:
        """Send a finished response."""
        self._pushed.append(self._dispatcher.push.remote(self._worker, rollout))

    def count(self, tokens: int) -> None:
        """So many tokens more were emitted."""
        got_on()
        self._tokens += tokens
        if time.monotonic() - self._reported_s > _REPORT_S:
            self._report()

    def flush(self) -> None:
        """Report all tokens; wait until every response has arrived."""
        ray.get(self._pushed)
        self._report()

    def ask(self, event: Progress) -> Order:
        """What this worker shall do while it has no request."""
        order: Order = ray.get(self._dispatcher.ask.remote(event))
        return order

    def take(self) -> OfferedPass:
        """The pass that this worker's order names."""
        taken: OfferedPass = ray.get(self._dispatcher.take.remote())
        return taken

    def _report(self) -> None:
        self._dispatcher.report.remote(self._worker, self._tokens)
        self._reported_s = time.monotonic()
