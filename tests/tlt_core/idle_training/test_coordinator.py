"""The coordinator's promises, for any sequence of events."""

import itertools
from collections import defaultdict

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tlt_core.idle_training.coordinator import (
    Action,
    Coordinator,
    IdleTrainingSettings,
    Order,
    PhaseReport,
    Progress,
    bubble,
)
from tlt_core.items.types import WorkerSpan, WorkerState

BUSY, IDLE, TRAINING = WorkerState.BUSY, WorkerState.IDLE, WorkerState.TRAINING
TRAIN = Order(Action.TRAIN, "training")
STOP = Order(Action.STOP, "rollout_over")


def wait(reason: str) -> Order:
    return Order(Action.WAIT, reason)


def test_passes_of_the_update_by_hand():
    """Each is computed once; first or last, as the settings say; the end of rollout pre-empts them."""
    stream = Order(Action.STREAM, "streaming")
    c = Coordinator(2, IdleTrainingSettings(min_idle_s=0.0), step=7, at_s=10.0)
    c.offer(2)
    assert c.order(Progress(0, 0, 11.0, has_data=True)) == stream
    assert c.order(Progress(0, 0, 12.0, has_data=True)) == stream
    assert c.order(Progress(0, 0, 13.0, has_data=True)) == TRAIN  # none is left
    c.offer(1)
    assert c.order(Progress(1, 0, 13.5, has_data=True)) == stream
    c.end(14.0)
    c.offer(1)
    assert c.order(Progress(1, 0, 14.1, has_data=True)) == STOP
    report = c.report(14.2)
    assert WorkerSpan(0, WorkerState.STREAMING, 11.0, 13.0) in report.spans
    assert WorkerSpan(1, WorkerState.STREAMING, 13.5, 14.1) in report.spans
    assert report.idle_by_reason_s == pytest.approx({"streaming": 2.5, "training": 1.0})
    assert bubble(report)["idle/streamed_s"] == pytest.approx(2.5)
    assert bubble(report)["idle/wait_s"] == pytest.approx(0.1)
    last = Coordinator(1, IdleTrainingSettings(min_idle_s=0.0, stream_first=False), step=7, at_s=10.0)
    last.offer(1)
    assert last.order(Progress(0, 0, 11.0, has_data=True)) == TRAIN
    assert last.order(Progress(0, 1, 12.0, has_data=False)) == stream


def test_a_phase_by_hand():
    c = Coordinator(2, IdleTrainingSettings(min_idle_s=0.2), step=7, at_s=10.0)
    assert c.order(Progress(0, 0, 11.0, has_data=True)) == wait("min_idle")
    assert c.order(Progress(0, 0, 11.1, has_data=True)) == wait("min_idle")
    assert c.order(Progress(0, 0, 11.25, has_data=True)) == TRAIN
    assert c.order(Progress(0, 1, 12.0, has_data=True)) == TRAIN
    assert c.order(Progress(0, 2, 13.0, has_data=False)) == wait("no_data")
    assert c.order(Progress(0, 2, 13.5, has_data=True)) == TRAIN
    assert c.order(Progress(1, 0, 14.0, has_data=True)) == wait("min_idle")
    c.end(14.05)
    assert c.order(Progress(0, 3, 14.15, has_data=True)) == STOP
    assert c.order(Progress(1, 0, 14.06, has_data=True)) == STOP
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
    assert (report.steps, report.over_s) == (3, 14.05)
    assert report.idle_by_reason_s == pytest.approx({"min_idle": 0.25 + 0.05, "training": 1.75 + 0.55, "no_data": 0.5})
    assert bubble(report) == pytest.approx(
        {
            "idle/streamed_s": 0.0,
            "idle/idle_s": 3.1,
            "idle/harvested_s": 2.3,
            "idle/harvested_ratio": 2.3 / 3.05,  # worker 1's window of 0.05 s is too short to count
            "idle/long_idle_s": 3.05,
            "idle/wait_s": 0.0,  # the drafter's pieces are no passes
            "idle/preempt_ms_p95": 100.0,
            "idle/untrained_s/min_idle": 0.3,
            "idle/untrained_s/no_data": 0.5,
        }
    )
    many = PhaseReport((), 0.0, tuple(0.001 * n for n in range(20, 0, -1)), 0, {})
    assert bubble(many)["idle/preempt_ms_p95"] == pytest.approx(19.0), "a measured one"


@pytest.mark.parametrize(
    ("settings", "step", "reason"),
    [(IdleTrainingSettings(enabled=False), 1, "disabled"), (IdleTrainingSettings(interval=3), 4, "interval")],
)
def test_a_phase_that_does_not_train_says_why(settings, step, reason):
    c = Coordinator(1, settings, step=step, at_s=0.0)
    assert c.order(Progress(0, 0, 1.0, has_data=True)) == wait(reason)
    assert c.order(Progress(0, 0, 9.0, has_data=True)) == wait(reason)
    c.end(10.0)
    assert c.report(10.0).idle_by_reason_s == {reason: 9.0}


def test_max_steps_counts_steps_that_are_under_way():
    c = Coordinator(3, IdleTrainingSettings(min_idle_s=0, max_steps=2), step=1, at_s=0.0)
    assert [c.order(Progress(w, 0, 1.0, has_data=True)) for w in range(3)] == [TRAIN, TRAIN, wait("max_steps")]
    assert c.order(Progress(0, 0, 1.5, has_data=False)) == wait("no_data")  # what it was ordered to do is free again
    assert c.order(Progress(2, 0, 2.0, has_data=True)) == TRAIN
    assert c.order(Progress(1, 1, 3.0, has_data=True)) == wait("max_steps")
    assert c.order(Progress(2, 1, 3.0, has_data=True)) == wait("max_steps")


WORKERS = 3
workers = st.integers(0, WORKERS - 1)


class AnyEvents(RuleBasedStateMachine):
    """Events in any order; steps done as a correct worker does them."""

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
        self.settings, self.step, self.now = settings, step, 100.0
        self.c = Coordinator(WORKERS, settings, step=step, at_s=self.now)
        self.over_s, self.expected_spans = None, 0
        self.done, self.ordered, self.idle_at = dict.fromkeys(range(WORKERS), 0), set(), {}

    def state(self, worker):
        return [span.state for span in self.c.report(self.now).spans if span.worker == worker][-1]

    @rule(seconds=st.sampled_from([0.0, 0.01, 0.3, 2.0]))
    def wait_a_moment(self, seconds):
        self.now += seconds

    @rule(worker=workers, has_data=st.booleans(), finished=st.booleans())
    def progress(self, worker, has_data, finished):
        """A worker's report, and all that must hold of the answer."""
        before = self.state(worker)
        if before == BUSY:
            self.idle_at[worker] = self.now
        self.done[worker] += worker in self.ordered and finished
        self.ordered.discard(worker)
        order = self.c.order(Progress(worker, self.done[worker], self.now, has_data))
        after = self.state(worker)
        # BUSY -> IDLE -> TRAINING at once, when there is no minimum
        self.expected_spans += (before != after) + ((before, after) == (BUSY, TRAINING))
        assert (order == STOP) == (self.over_s is not None)
        assert (order.reason == "training") == (order.action == Action.TRAIN) == (after == TRAINING)
        assert after != BUSY
        if order.action == Action.TRAIN:
            assert has_data
            assert self.settings.enabled
            assert self.step % self.settings.interval == 0
            assert self.now - self.idle_at[worker] >= self.settings.min_idle_s
            self.ordered.add(worker)

    @precondition(lambda self: self.over_s is None)
    @rule()
    def over(self):
        self.over_s = self.now
        self.training_at_end = {w for w in range(WORKERS) if self.state(w) == TRAINING}
        self.c.end(self.now)

    @invariant()
    def one_state_and_contiguous_spans(self):
        report = self.c.report(self.now)
        assert len(report.spans) == self.expected_spans + WORKERS
        by_worker = defaultdict(list)
        for span in report.spans:
            by_worker[span.worker].append(span)
        for spans in by_worker.values():
            assert spans[0].start_s == 100.0
            assert all(a.end_s == b.start_s for a, b in itertools.pairwise(spans))
            assert all(a.end_s >= a.start_s for a in spans)
            assert spans[-1].end_s == self.now

    @invariant()
    def every_idle_second_has_one_reason(self):
        report = self.c.report(self.now)
        figures = bubble(report)
        assert sum(report.idle_by_reason_s.values()) == pytest.approx(figures["idle/idle_s"])
        assert report.idle_by_reason_s.get("training", 0.0) == pytest.approx(figures["idle/harvested_s"])
        assert "rollout_over" not in report.idle_by_reason_s

    @invariant()
    def max_steps_holds(self):
        report = self.c.report(self.now)
        assert report.steps == sum(self.done.values())
        if self.settings.max_steps:
            in_flight = sum(self.state(w) == TRAINING for w in range(WORKERS))
            assert report.steps + in_flight <= self.settings.max_steps + (self.over_s is not None) * WORKERS

    @invariant()
    def preemption_is_measured_once_per_trainer(self):
        if self.over_s is not None:
            report = self.c.report(self.now)
            assert len(report.preempt_s) <= len(self.training_at_end)
            assert all(0 <= s <= self.now - self.over_s for s in report.preempt_s)


TestAnyEvents = AnyEvents.TestCase
TestAnyEvents.settings = hypothesis_settings(max_examples=120, stateful_step_count=40, deadline=None)
