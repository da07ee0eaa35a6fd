"""Hands out requests to workers and gathers what they finish.  A plain class; the group runs it as a Ray actor.

    driver  --begin(groups), extend, offer(passes)-->  Dispatcher  <--pull / push / report / ask / take--  workers
    driver  <--drain()-------------------------------

Orders for idle workers (compute a pass of the update, train the drafter, wait, stop) are `idle_training/coordinator`'s.

`pull`: one queue.  No worker gets more than a fair share of the outstanding requests, so they go to free workers.
`static`: whole groups are dealt up front, as in classic data parallelism.

Rollouts come by `push`, not as a stream from the worker's call, because the dispatcher must hear of each in any case:
fair shares and the end of rollout depend on it.
"""

import time
from collections import deque
from collections.abc import Sequence
from typing import Literal, NamedTuple

from tlt_core.cluster.engines import Engines
from tlt_core.cluster.heartbeat import Signs
from tlt_core.grpo.batch import TrainBatch
from tlt_core.grpo.passes import Key
from tlt_core.idle_training.coordinator import (
    Action,
    Coordinator,
    IdleTrainingSettings,
    Order,
    PhaseReport,
    Progress,
)
from tlt_core.items.types import GenerationRequest, Rollout

OfferedPass = tuple[Key, TrainBatch]
"""A pass of the policy update that a worker without requests may compute."""


class Pulled(NamedTuple):
    requests: tuple[GenerationRequest, ...]
    exhausted: bool  # no request is left for this worker in this phase: do not ask again
    more_later: bool = False  # in an open phase: there may be some again


class Drained(NamedTuple):
    """Answer to `drain`: what happened since the last call."""

    finished: tuple[Rollout, ...]
    live: tuple[int, ...]  # requests being decoded, per worker
    tokens: int  # tokens emitted in this phase, all workers


class Dispatcher(Signs):
    """State of one generation phase at a time, and the workers' signs of life."""

    def begin(
        self,
        groups: Sequence[Sequence[GenerationRequest]],
        *,
        engines: Engines,
        dispatch: Literal["pull", "static"],
        step: int = 0,
        is_open: bool = False,
        idle_training: IdleTrainingSettings = IdleTrainingSettings(enabled=False),  # noqa: B008 (immutable)
    ) -> None:
        """Start a phase of RL step `step`.

        groups: the requests of each prompt; none: a phase of waiting.  is_open: the phase lasts until `end`, and
        `extend` may add requests to it.  idle_training: who may train when.
        """
        num_workers, hosts = engines.num_workers, engines.hosts
        self._coordinator = Coordinator(num_workers, idle_training, step=step, at_s=time.time())
        self._ended_s = 0.0
        self._offered: deque[OfferedPass] = deque()
        self._engines = engines
        self._idle: set[int] = set()  # workers that have run out of requests
        self._live = [0] * num_workers
        self._tokens = [0] * num_workers
        self._finished: list[Rollout] = []
        self._outstanding = sum(len(g) for g in groups)
        if dispatch == "static":
            dealt = [groups[i :: len(hosts)] for i in range(len(hosts))]
            self._queues = {host: deque(r for g in mine for r in g) for host, mine in zip(hosts, dealt, strict=True)}
        else:
            queue = deque(r for g in groups for r in g)
            self._queues = {host: queue for host in hosts}
        self._returning: dict[int, deque[GenerationRequest]] = {host: deque() for host in hosts}
        self._shared, self._is_open = dispatch == "pull", is_open

    def pull(self, worker: int, wanted: int) -> Pulled:
        """Up to `wanted` requests for a worker.  One without an engine gets none, and is done when its engine is."""
        if not self._engines.is_host(worker):
            return Pulled((), exhausted=self._engines.host_of(worker) in self._idle)
        queue, fair = self._queues[worker], -(-self._outstanding // len(self._queues))
        if self._shared:
            wanted = min(wanted, fair - self._live[worker])
        requests: list[GenerationRequest] = []
        # Turns that this worker can continue, then new requests, then turns of others who are busy, when it is not.
        others = [own for host, own in self._returning.items() if not self._live[worker] or self._live[host] >= fair]
        for source in (self._returning[worker], queue, *others):
            while source and len(requests) < wanted:
                requests.append(source.popleft())
        self._live[worker] += len(requests)
        return Pulled(tuple(requests), exhausted=not self._waiting(worker), more_later=self._is_open)

    def push(self, worker: int, rollout: Rollout) -> None:
        self._finished.append(rollout)
        self._live[worker] -= 1
        self._outstanding -= 1
        if self._outstanding == 0 and not self._is_open:
            self._coordinator.end(time.time())

    def extend(self, requests: Sequence[tuple[GenerationRequest, int]]) -> None:
        """Further turns of episodes, each with the worker that decoded the turn before and can continue it soonest."""
        self._outstanding += len(requests)
        for request, worker in requests:
            self._returning[worker].append(request)

    def end(self) -> None:
        self._is_open = False
        self._coordinator.end(time.time())

    def report(self, worker: int, tokens: int) -> None:
        self._tokens[worker] = tokens

    def ask(self, event: Progress) -> Order:
        """A worker without requests asks what to do next."""
        host = self._engines.host_of(event.worker)
        if self._waiting(host) or (self._is_open and host != event.worker and host not in self._idle):
            self._idle.discard(event.worker)
            return self._coordinator.busy(event)
        self._idle.add(event.worker)
        order = self._coordinator.order(event)
        if order.action is Action.STOP:
            self._ended_s = time.time()
        return order

    def _waiting(self, host: int) -> bool:
        return bool(self._queues[host]) or any(self._returning.values())

    def offer(self, passes: Sequence[OfferedPass]) -> None:
        """Passes of the update that idle workers may compute in this phase."""
        self._offered.extend(passes)
        self._coordinator.offer(len(passes))

    def take(self) -> OfferedPass:
        """The next pass, for a worker whose order is to compute one."""
        return self._offered.popleft()

    def phase(self) -> PhaseReport:
        """What every worker did in the phase, until the last one left it."""
        return self._coordinator.report(self._ended_s or time.time())

    def drain(self) -> Drained:
        """What finished since the last call, and the live counts."""
        finished, self._finished = tuple(self._finished), []
        return Drained(finished, tuple(self._live), sum(self._tokens))
