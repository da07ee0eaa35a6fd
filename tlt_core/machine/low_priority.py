"""Work that yields its core to everything else on the machine, such as the driver and the services.

An idle worker that trains keeps its core busy.  The driver, Ray and Prefect's server would then run on the core of a
worker that still decodes.  Linux has a scheduling class for such work, SCHED_IDLE: other threads take the core at once.

Any thread may enter the class; leaving it takes CAP_SYS_NICE or a generous RLIMIT_NICE.  On a busy machine the class
gets hardly any time, so each piece of work returns to ordinary priority after its patience.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache


@cache
def may_give_way() -> bool:
    """Whether this process may enter the class and leave it again.  A separate thread tries it."""
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
    """Run the block in SCHED_IDLE for at most `patience_s` seconds; changes nothing where `may_give_way` is False.

    A thread that is started in the block inherits the class and keeps it.
    """
    if not may_give_way():
        yield
        return
    thread, over, lock = threading.get_native_id(), False, threading.Lock()
    before = os.sched_getscheduler(thread), os.sched_getparam(thread)

    def lose_patience() -> None:
        with lock:
            if not over:  # later, the number may belong to another thread
                os.sched_setscheduler(thread, *before)

    watch = threading.Timer(patience_s, lose_patience)
    watch.daemon = True
    watch.start()  # before the class changes: a thread inherits it
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
