"""A thread that gives way does so for the length of its work, and no longer than its patience."""

import os
import sys
import threading
import time
from collections.abc import Callable

import pytest

from tlt_core.machine.low_priority import giving_way, may_give_way

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="SCHED_IDLE is Linux")
needs_the_right = pytest.mark.skipif(not may_give_way(), reason="this process may not leave SCHED_IDLE again")


def policy() -> int:
    return os.sched_getscheduler(threading.get_native_id())


def test_the_work_gives_way_and_what_follows_does_not() -> None:
    before = policy()
    with giving_way(60):
        inside = policy()
    assert inside == (os.SCHED_IDLE if may_give_way() else before)
    assert policy() == before


def from_batch(work: Callable[[], None]) -> list[int]:
    """The thread's class during `work`, which begins in SCHED_BATCH, and after it."""
    seen: list[int] = []

    def run() -> None:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        with giving_way(0.05):
            seen.append(policy())
            work()
            seen.append(policy())
        seen.append(policy())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return seen


@needs_the_right
def test_the_class_before_comes_back() -> None:
    assert from_batch(lambda: None) == [os.SCHED_IDLE, os.SCHED_IDLE, os.SCHED_BATCH]


@needs_the_right
def test_patience_ends() -> None:
    def work() -> None:
        until_s = time.monotonic() + 30
        while policy() == os.SCHED_IDLE and time.monotonic() < until_s:
            time.sleep(0.01)

    assert from_batch(work) == [os.SCHED_IDLE, os.SCHED_BATCH, os.SCHED_BATCH]


@needs_the_right
def test_who_watches_does_not_give_way() -> None:
    """Else it would get no time on the machine that it is there for."""
    before, others = policy(), set(threading.enumerate())
    with giving_way(60):
        (watch,) = set(threading.enumerate()) - others
        assert watch.native_id is not None
        assert os.sched_getscheduler(watch.native_id) == before


def test_an_error_ends_it_too() -> None:
    before = policy()
    with pytest.raises(RuntimeError, match="work failed"), giving_way(60):
        raise RuntimeError("work failed")
    assert policy() == before


def test_asking_changes_nothing() -> None:
    before = policy()
    may_give_way()
    assert policy() == before


def test_where_leaving_is_forbidden_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def schedule(thread: int, policy: int, param: os.sched_param) -> None:
        seen.append(policy)
        if policy == os.SCHED_OTHER:
            raise PermissionError(1, "Operation not permitted")

    before = policy()
    may_give_way.cache_clear()
    monkeypatch.setattr(os, "sched_setscheduler", schedule)
    try:
        assert not may_give_way()
        tried = len(seen)
        with giving_way(60):
            assert policy() == before
        assert len(seen) == tried
    finally:
        may_give_way.cache_clear()
