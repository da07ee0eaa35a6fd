"""Work that gives way to everything else on the machine, the driver and the services beside it included.

An idle worker that trains keeps its core busy, so what would have run there (driver, Ray, Prefect's server) runs on the
core of a worker that still decodes.  Linux has a class for such work, SCHED_IDLE: whoever wakes up finds its core free.

Entering the class is free to all; leaving it again takes CAP_SYS_NICE, or a generous RLIMIT_NICE.  On a machine that
others fill it gets next to no time; so each piece of work is given the ordinary priority back after its patience.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache


@cache
def may_give_way() -> bool:
    """Whether this process may both enter the class and leave it again; tried in a thread of its own."""
    if not hasattr(os, "SCHED_IDLE"):  # not Linux
        return False
    answers: list[bool] = []

    def attempt() -> None:
        try:
            _schedule(0, os.SCHED_IDLE)
            _schedule(0, os.SCHED_OTHER)
        except OSError:
            answers.append(False)
        else:
            answers.append(True)

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    return answers[0]


@contextmanager
def giving_way(patience_s: float) -> Iterator[None]:
    """The calling thread gives way for so many seconds at most, as does, without an end, a thread that it starts then.

    Changes nothing where `may_give_way` is False.
    """
    if not may_give_way():
        yield
        return
    thread, over, lock = threading.get_native_id(), False, threading.Lock()
    before = os.sched_getscheduler(thread), os.sched_getparam(thread)

    def lose_patience() -> None:
        with lock:
            if not over:  # the number may be another thread's by now
                os.sched_setscheduler(thread, *before)

    watch = threading.Timer(patience_s, lose_patience)
    watch.daemon = True
    watch.start()  # first: a thread inherits the class of the one that starts it
    try:
        _schedule(thread, os.SCHED_IDLE)
        yield
    finally:
        watch.cancel()
        with lock:
            over = True
            os.sched_setscheduler(thread, *before)


def _schedule(thread: int, policy: int) -> None:
    os.sched_setscheduler(thread, policy, os.sched_param(0))
