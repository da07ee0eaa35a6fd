"""The end of a phase reaches workers in the middle of their work, by a real store."""

import logging
import time

import pytest

from tlt_core.cluster.phase_end import PhaseEnd
from tlt_core.cluster.rendezvous import LOOPBACK, host_store


def soon(condition):
    deadline_s = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline_s:
        time.sleep(0.002)
    return condition()


def test_what_one_announces_the_others_know_for_that_phase_alone():
    store, meeting_point = host_store(LOOPBACK, world_size=2)
    one, other = (PhaseEnd.at(meeting_point, world_size=2) for _ in range(2))
    for _ in range(2):
        one.begin()
        other.begin()
        time.sleep(0.02)
        assert not other.reached()
        one.announce()
        assert soon(other.reached)
    one.begin()
    one.announce()
    time.sleep(0.02)
    assert other.reached(), "of its own phase"
    other.begin()
    assert soon(other.reached), "announced before this worker began"
    del store


def test_looks_are_rare():
    store, meeting_point = host_store(LOOPBACK, world_size=2)
    end = PhaseEnd.at(meeting_point, world_size=2)
    end.begin()
    assert not end.reached()
    end.announce()
    assert not end.reached(), "it has just looked"
    assert soon(end.reached)
    del store


def test_a_lone_worker_has_nobody_to_tell():
    end = PhaseEnd.at("nowhere:1", world_size=1)
    end.begin()
    end.announce()
    assert not end.reached()


def test_the_loss_of_the_store_ends_nothing(caplog: pytest.LogCaptureFixture):
    """As when the worker that hosts it dies."""
    store, meeting_point = host_store(LOOPBACK, world_size=2)
    end = PhaseEnd.at(meeting_point, world_size=2)
    end.begin()
    assert not end.reached()
    del store
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            time.sleep(0.02)
            assert not end.reached()
            end.announce()
    assert sum("store of the worker group is lost" in r.message for r in caplog.records) == 1
