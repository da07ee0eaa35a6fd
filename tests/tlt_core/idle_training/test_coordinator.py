"""The coordinator's promises, for any sequence of events."""

import itertools
from collections import defaultdict

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tlt_core.idle_training.bubble import bubble
from tlt_core.idle_training.coordinator import (
    Action,
    Coordinator,
    IdleTrainingSettings,
    Order,
    PassesOffered,
    PhaseBegan,
    Progress,
    RolloutOver,
    WorkerIdle,
)
from tlt_core.items.types import WorkerSpan, WorkerState

BUSY, IDLE, TRAINING = WorkerState.BUSY, WorkerState.IDLE, WorkerState.TRAINING
TRAIN = Order(Action.TRAIN, "training")


def wait(reason: str) -> Order:
    return Order(Action.WAIT, reason)


def test_passes_of_the_update_by_hand():
    """Each is computed once; first or last, as the settings say; the end of rollout pre-empts them."""
    stream = Order(Action.STREAM, "streaming")
    c = Coordinator(2, IdleTrainingSettings(min_idle_s=0.0))
    c.handle(PhaseBegan(step=7, at_s=10.0))
    c.handle(PassesOffered(2))
    assert c.handle(WorkerIdle(0, 11.0, has_data=True)) == stream
    assert c.state(0) == WorkerState.STREAMING
    assert c.handle(Progress(0, 0, 12.0, has_data=True)) == stream
    assert c.handle(Progress(0, 0, 13.0, has_data=True)) == TRAIN  # none is left
    c.handle(PassesOffered(1))
    assert c.handle(WorkerIdle(1, 13.5, has_data=True)) == stream
    c.handle(RolloutOver(14.0))
    c.handle(PassesOffered(1))
    assert c.handle(Progress(1, 0, 14.1, has_data=True)) == Order(Action.STOP, "rollout_over")
    report = c.report(14.2)
    assert WorkerSpan(0, WorkerState.STREAMING, 11.0, 13.0) in report.spans
    assert WorkerSpan(1, WorkerState.STREAMING, 13.5, 14.1) in report.spans
    assert report.preempt_s == pytest.approx((0.1,))
    assert report.idle_by_reason_s == pytest.approx({"streaming": 2.5, "training": 1.0})
    metrics = bubble(report.spans, over_s=report.over_s, idle_by_reason_s=report.idle_by_reason_s)
    assert metrics == pytest.approx(
        {
            "idle/streamed_s": 2.5,
            "idle/idle_s": 3.5,
            "idle/harvested_s": 3.5,
            "idle/long_idle_s": 3.0,
            "idle/harvested_ratio": 1.0,
        }
    )
    last = Coordinator(1, IdleTrainingSettings(min_idle_s=0.0, stream_first=False))
    last.handle(PhaseBegan(step=7, at_s=10.0))
    last.handle(PassesOffered(1))
    assert last.handle(WorkerIdle(0, 11.0, has_data=True)) == TRAIN
    assert last.handle(Progress(0, 1, 12.0, has_data=False)) == stream


def test_a_phase_by_hand():
    c = Coordinator(2, IdleTrainingSettings(min_idle_s=0.2))
    assert c.handle(PhaseBegan(step=7, at_s=10.0)) is None
    assert c.handle(WorkerIdle(0, 11.0, has_data=True)) == wait("min_idle")
    assert c.handle(Progress(0, 0, 11.1, has_data=True)) == wait("min_idle")
    assert c.handle(Progress(0, 0, 11.25, has_data=True)) == TRAIN
    assert c.handle(Progress(0, 1, 12.0, has_data=True)) == TRAIN
    assert c.handle(Progress(0, 2, 13.0, has_data=False)) == wait("no_data")
    assert c.handle(Progress(0, 2, 13.5, has_data=True)) == TRAIN
    assert c.handle(WorkerIdle(1, 14.0, has_data=True)) == wait("min_idle")
    assert c.handle(RolloutOver(14.05)) is None
    assert c.handle(Progress(0, 3, 14.15, has_data=True)) == Order(Action.STOP, "rollout_over")
    assert c.handle(Progress(1, 0, 14.06, has_data=True)) == Order(Action.STOP, "rollout_over")
    report = c.report(14.2)
    assert report.spans == (
        WorkerSpan(0, BUSY, 10.0, 11.0),
        WorkerSpan(0, IDLE, 11.0, 11.25),
        WorkerSpan(0, TRAINING, 11.25, 13.0),
        WorkerSpan(0, IDLE, 13.0, 13.5),
        WorkerSpan(0, TRAINING, 13.5, 14.15),
        WorkerSpan(0, IDLE, 14.15, 14.2),
        WorkerSpan(1, BUSY, 10.0, 14.0),
        WorkerSpan(1, IDLE, 14.0, 14.2),
    )
    assert report.steps == 3
    assert report.over_s == 14.05
    assert report.preempt_s == pytest.approx((0.1,))
    assert report.idle_by_reason_s == pytest.approx({"min_idle": 0.25 + 0.05, "training": 1.75 + 0.55, "no_data": 0.5})
    metrics = bubble(report.spans, over_s=14.05, preempt_s=report.preempt_s, idle_by_reason_s=report.idle_by_reason_s)
    assert metrics == pytest.approx(
        {
            "idle/streamed_s": 0.0,
            "idle/idle_s": 3.1,
            "idle/harvested_s": 2.3,
            "idle/harvested_ratio": 2.3 / 3.05,  # worker 1's window of 0.05 s is too short to count
            "idle/long_idle_s": 3.05,
            "idle/preempt_ms_p95": 100.0,
            "idle/untrained_s/min_idle": 0.3,
            "idle/untrained_s/no_data": 0.5,
        }
    )


def test_p95_of_preemption_is_a_measured_one():
    metrics = bubble([], over_s=0.0, preempt_s=[0.001 * n for n in range(20, 0, -1)])
    assert metrics["idle/preempt_ms_p95"] == pytest.approx(19.0)


@pytest.mark.parametrize(
    ("settings", "step", "reason"),
    [(IdleTrainingSettings(enabled=False), 1, "disabled"), (IdleTrainingSettings(interval=3), 4, "interval")],
)
def test_a_phase_that_does_not_train_says_why(settings, step, reason):
    c = Coordinator(1, settings)
    c.handle(PhaseBegan(step, 0.0))
    assert c.handle(WorkerIdle(0, 1.0, has_data=True)) == wait(reason)
    assert c.handle(Progress(0, 0, 9.0, has_data=True)) == wait(reason)
    c.handle(RolloutOver(10.0))
    assert c.report(10.0).idle_by_reason_s == {reason: 9.0}


def test_every_third_step_trains():
    c = Coordinator(1, IdleTrainingSettings(interval=3, min_idle_s=0))
    trained = []
    for step in range(1, 8):
        c.handle(PhaseBegan(step, float(step)))
        trained.append(c.handle(WorkerIdle(0, step + 0.5, has_data=True)) == TRAIN)
    assert trained == [False, False, True, False, False, True, False]


def test_max_steps_counts_steps_that_are_under_way():
    c = Coordinator(3, IdleTrainingSettings(min_idle_s=0, max_steps=2))
    c.handle(PhaseBegan(1, 0.0))
    assert [c.handle(WorkerIdle(w, 1.0, has_data=True)) for w in range(3)] == [TRAIN, TRAIN, wait("max_steps")]
    assert c.handle(Progress(0, 0, 1.5, has_data=False)) == wait("no_data")  # what it was ordered to do is free again
    assert c.handle(Progress(2, 0, 2.0, has_data=True)) == TRAIN
    assert c.handle(Progress(1, 1, 3.0, has_data=True)) == wait("max_steps")
    assert c.handle(Progress(2, 1, 3.0, has_data=True)) == wait("max_steps")


def test_late_and_unknown_reports_are_answered():
    c = Coordinator(1, IdleTrainingSettings())
    assert c.handle(Progress(0, 0, 0.0, has_data=True)) == Order(Action.STOP, "rollout_over")  # before the first phase
    c.handle(PhaseBegan(1, 1.0))
    c.handle(RolloutOver(4.0))
    assert c.handle(WorkerIdle(0, 5.0, has_data=True)) == Order(Action.STOP, "rollout_over")
    assert c.report(6.0).spans == (WorkerSpan(0, BUSY, 1.0, 5.0), WorkerSpan(0, IDLE, 5.0, 6.0))


WORKERS = 3
workers = st.integers(0, WORKERS - 1)


class AnyEvents(RuleBasedStateMachine):
    """Events in any order, also those that a correct worker never sends; steps done as a correct worker does them."""

    @initialize(
        settings=st.builds(
            IdleTrainingSettings,
            enabled=st.sampled_from([True, True, True, False]),
            min_idle_s=st.sampled_from([0.0, 0.2]),
            max_steps=st.sampled_from([0, 1, 4]),
            interval=st.sampled_from([1, 1, 2]),
        ),
        step=st.integers(1, 4),
    )
    def begin(self, settings, step):
        self.settings, self.c, self.now = settings, Coordinator(WORKERS, settings), 100.0
        self.start(step)

    def start(self, step):
        self.step, self.began_s, self.over_s = step, self.now, None
        self.expected_spans = 0
        self.done, self.ordered = dict.fromkeys(range(WORKERS), 0), set()
        self.idle_at = {}
        self.c.handle(PhaseBegan(step, self.now))

    def send(self, event):
        """Send a worker's event and check all that must hold of its answer."""
        before = self.c.state(event.worker)
        order = self.c.handle(event)
        after = self.c.state(event.worker)
        if before != after:
            self.expected_spans += 1
            # BUSY -> IDLE -> TRAINING at once, when there is no minimum
            self.expected_spans += (before, after) == (BUSY, TRAINING)
        if self.over_s is not None:
            assert order == Order(Action.STOP, "rollout_over")
        else:
            assert order.action != Action.STOP
            assert (order.reason == "training") == (order.action == Action.TRAIN) == (after == TRAINING)
            assert (order.reason == "busy") == (after == BUSY)
        if order.action == Action.TRAIN:
            assert before != BUSY or isinstance(event, WorkerIdle)
            assert self.settings.enabled
            assert self.step % self.settings.interval == 0
            assert self.now - self.idle_at[event.worker] >= self.settings.min_idle_s
            self.ordered.add(event.worker)
        return order

    @rule(seconds=st.sampled_from([0.0, 0.01, 0.3, 2.0]))
    def wait_a_moment(self, seconds):
        self.now += seconds

    @rule(worker=workers, has_data=st.booleans())
    def idle(self, worker, has_data):
        if self.c.state(worker) == BUSY:
            self.idle_at[worker] = self.now
        self.ordered.discard(worker)
        order = self.send(WorkerIdle(worker, self.now, has_data))
        assert has_data or order.action != Action.TRAIN

    @rule(worker=workers, has_data=st.booleans(), finished=st.booleans())
    def progress(self, worker, has_data, finished):
        self.done[worker] += worker in self.ordered and finished
        self.ordered.discard(worker)
        order = self.send(Progress(worker, self.done[worker], self.now, has_data))
        assert has_data or order.action != Action.TRAIN

    @precondition(lambda self: self.over_s is None)
    @rule()
    def over(self):
        self.over_s = self.now
        self.training_at_end = {w for w in range(WORKERS) if self.c.state(w) == TRAINING}
        self.c.handle(RolloutOver(self.now))

    @precondition(lambda self: self.over_s is not None)
    @rule()
    def next_phase(self):
        self.start(self.step + 1)

    @invariant()
    def one_state_and_contiguous_spans(self):
        report = self.c.report(self.now)
        assert all(self.c.state(w) is not None for w in range(WORKERS))
        assert len(report.spans) == self.expected_spans + WORKERS
        by_worker = defaultdict(list)
        for span in report.spans:
            by_worker[span.worker].append(span)
        for spans in by_worker.values():
            assert spans[0].start_s == self.began_s
            assert all(a.end_s == b.start_s for a, b in itertools.pairwise(spans))
            assert all(a.end_s >= a.start_s for a in spans)
            assert spans[-1].end_s == self.now

    @invariant()
    def every_idle_second_has_one_reason(self):
        report = self.c.report(self.now)
        figures = bubble(report.spans, over_s=report.over_s)
        assert sum(report.idle_by_reason_s.values()) == pytest.approx(figures["idle/idle_s"])
        trained = report.idle_by_reason_s.get("training", 0.0)
        assert trained == pytest.approx(figures["idle/harvested_s"])
        assert "rollout_over" not in report.idle_by_reason_s

    @invariant()
    def max_steps_holds(self):
        report = self.c.report(self.now)
        assert report.steps == sum(self.done.values())
        if self.settings.max_steps:
            assert report.steps <= self.settings.max_steps
            in_flight = sum(self.c.state(w) == TRAINING for w in range(WORKERS))
            assert report.steps + in_flight <= self.settings.max_steps + (self.over_s is not None) * WORKERS

    @invariant()
    def preemption_is_measured_once_per_trainer(self):
        if self.over_s is not None:
            report = self.c.report(self.now)
            assert len(report.preempt_s) <= len(self.training_at_end)
            assert all(0 <= s <= self.now - self.over_s for s in report.preempt_s)


TestAnyEvents = AnyEvents.TestCase
TestAnyEvents.settings = hypothesis_settings(max_examples=120, stateful_step_count=40, deadline=None)
