"""Any order of pulls, answers, questions and offers: each request is answered once, and the phase can end."""

from collections import Counter
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.fuzz import cases, fuzz
from tests.tlt_core.cluster.test_dispatcher import finish, groups
from tlt_core.cluster.dispatcher import Dispatcher
from tlt_core.cluster.engines import Engines
from tlt_core.idle_training.coordinator import Action, IdleTrainingSettings, Progress
from tlt_core.items.types import GenerationRequest, NoiseKey

workers = st.integers(0, 3)


class AnyPhase(RuleBasedStateMachine):
    """Workers, the driver, and what the dispatcher may say to them."""

    @initialize(
        sizes=st.lists(st.integers(1, 3), max_size=5),
        engines=st.sampled_from([*(Engines(n) for n in range(1, 5)), Engines(2, 2), Engines(4, 2)]),
        dispatch=st.sampled_from(["pull", "static"]), trains=st.booleans(), stream_first=st.booleans(),
    )  # fmt: skip
    def begin(self, sizes: list[int], engines: Engines, dispatch: Any, trains: bool, stream_first: bool) -> None:
        idle_training = IdleTrainingSettings(enabled=trains, min_idle_s=0.0, stream_first=stream_first)
        asked = [groups(len(sizes), size)[number] for number, size in enumerate(sizes)]
        self.dispatcher = Dispatcher()
        self.dispatcher.begin(asked, engines=engines, dispatch=dispatch, idle_training=idle_training)
        self.engines = engines
        self.wanted = {request.key for group in asked for request in group}
        self.static = dispatch == "static"
        self.held: dict[int, list[GenerationRequest]] = {worker: [] for worker in range(engines.num_workers)}
        self.given: Counter[NoiseKey] = Counter()
        self.answered: Counter[NoiseKey] = Counter()
        self.drained: Counter[NoiseKey] = Counter()
        self.idle: set[int] = set()  # workers that have asked what to do
        self.offered, self.taken = 0, 0
        self.steps: Counter[int] = Counter()
        self.training: set[int] = set()
        self.over = False

    def pull(self, worker: int, wanted: int) -> None:
        """The worker's requests, and the promise not to come again."""
        requests, exhausted, _ = self.dispatcher.pull(worker, wanted)
        assert len(requests) <= wanted
        self.given.update(request.key for request in requests)
        self.held[worker] += requests
        if not self.engines.is_host(worker):
            host = self.engines.host_of(worker)
            assert not requests, "it has no engine"
            assert exhausted == (host in self.training), "its GPU is in use"
        elif not self.static:
            assert exhausted == (sum(self.given.values()) == len(self.wanted))
        if exhausted and not self.held[worker]:
            self.idle.add(worker)

    @rule(worker=workers, wanted=st.integers(0, 9))
    def pulls(self, worker: int, wanted: int) -> None:
        if worker in self.held and worker not in self.idle:
            self.pull(worker, wanted)

    def push(self, worker: int) -> None:
        """The worker's newest request ends."""
        request = self.held[worker].pop()
        self.answered[request.key] += 1
        self.dispatcher.push(worker, finish(request))
        self.over |= sum(self.answered.values()) == len(self.wanted)

    @rule(worker=workers, tokens=st.integers(0, 9))
    def pushes(self, worker: int, tokens: int) -> None:
        self.dispatcher.report(worker % len(self.held), tokens)
        if self.held.get(worker):
            self.push(worker)

    def ask(self, worker: int) -> Action:
        """A worker without requests asks, and does at once what it is told."""
        action = self.dispatcher.ask(Progress(worker, self.steps[worker], 0.0, has_data=True)).action
        assert (action is Action.STOP) == self.over
        self.training.add(worker)
        if action is Action.TRAIN:
            self.steps[worker] += 1
        if action is Action.STREAM:
            assert self.dispatcher.take()[0] == (self.taken, 0), "each pass once, in the order of the offers"
            self.taken += 1
        return action

    @precondition(lambda self: self.idle)
    @rule(data=st.data())
    def asks(self, data: st.DataObject) -> None:
        self.ask(data.draw(st.sampled_from(sorted(self.idle))))

    @rule(count=st.integers(0, 2))
    def offer(self, count: int) -> None:
        nothing: Any = None  # a share's content is none of the dispatcher's business
        self.dispatcher.offer([((self.offered + i, 0), nothing) for i in range(count)])
        self.offered += count

    @rule()
    def drain(self) -> None:
        finished, live, _ = self.dispatcher.drain()
        self.drained.update(rollout.key for rollout in finished)
        assert self.drained == self.answered
        assert list(live) == [len(self.held[worker]) for worker in sorted(self.held)]

    @invariant()
    def nothing_twice(self) -> None:
        if hasattr(self, "given"):
            assert max(self.given.values(), default=0) <= 1
            assert self.taken <= self.offered

    def teardown(self) -> None:
        """Whatever came before, the workers bring the phase to its end."""
        if not hasattr(self, "given"):
            return
        for _ in range(2 * len(self.wanted) + 2):
            for worker in sorted(self.held.keys() - self.idle):
                self.pull(worker, 2)
                if self.held[worker]:
                    self.push(worker)
            for worker in sorted(self.idle):
                self.ask(worker)
        self.drain()
        assert self.drained == Counter(dict.fromkeys(self.wanted, 1))
        assert self.idle == self.held.keys()
        if not self.wanted:
            self.dispatcher.end()
            self.over = True
        assert all(self.ask(worker) is Action.STOP for worker in sorted(self.held))
        report = self.dispatcher.phase()
        assert {span.worker for span in report.spans} == set(self.held)


@cases(few=60, many=1500)
def test_any_order_of_events(count: int) -> None:
    run_state_machine_as_test(AnyPhase, settings=settings(fuzz(count), stateful_step_count=40))
