"""Calls to a service that may fail or never answer.  A thread makes them, in order; nobody else waits for the service.

    run --put(call)--> Outbox --thread--> service
                          '-- a call that fails stays first, and is made again after a pause

`settle` waits for the thread, but not for ever.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

log = logging.getLogger(__name__)

_RETRY_S = 5.0  # between two attempts at a call
_MOST_CALLS = 10_000  # a day of steps; each holds a step's numbers at most, so all of them are some MB
_ATTEMPTS_THAT_SETTLE = 2  # the first may have begun before the service came back


class Outbox:
    """One thread.  It is a daemon, so a call that hangs does not keep the process from ending."""

    def __init__(self, name: str, *, errors: tuple[type[Exception], ...], refused: Callable[[Exception], bool]) -> None:
        """name: of the service, for log lines.  errors: its failures.  refused: would the same call always fail?"""
        self._name, self._errors, self._refused = name, errors, refused
        self._calls: deque[Callable[[], object]] = deque()
        self._changed = threading.Condition()
        self._hurry = threading.Event()
        self._failures = 0
        self._dropped = 0
        self._is_down = False
        self._is_closed = False
        self._defect: Exception | None = None
        self._thread = threading.Thread(target=self._serve, name=f"outbox of {name}", daemon=True)
        self._thread.start()

    def put(self, call: Callable[[], object]) -> None:
        """Have a call made; returns at once.  Raises what an earlier call has raised that is no failure of the service.

        When `_MOST_CALLS` wait, further ones are dropped.
        """
        with self._changed:
            if self._defect is not None:
                raise self._defect
            if len(self._calls) < _MOST_CALLS:
                self._calls.append(call)
            else:
                self._dropped += 1
            self._changed.notify_all()

    def settle(self, *, within_s: float) -> int:
        """Wait until all calls are made, or the service has failed again, or the time is over.

        Returns how many calls have not been made.  Raises as `put` does.
        """
        with self._changed:
            enough = self._failures + _ATTEMPTS_THAT_SETTLE
            self._hurry.set()
            self._changed.wait_for(
                lambda: not self._calls or self._failures >= enough or self._defect is not None, timeout=within_s
            )
            if self._defect is not None:
                raise self._defect
            return len(self._calls) + self._dropped

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._hurry.set()
            self._changed.notify_all()

    def _serve(self) -> None:
        try:
            while not self._is_closed:
                self._make_next()
        except Exception as defect:  # a mistake of ours: the run raises it at its next call
            with self._changed:
                self._defect = defect
                self._changed.notify_all()

    def _make_next(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._calls or self._is_closed)
            if self._is_closed:
                return
            call = self._calls[0]
        done = self._succeeds(call)
        with self._changed:
            if done:
                self._calls.popleft()
            else:
                self._failures += 1
            self._changed.notify_all()
        if not done:
            self._hurry.wait(_RETRY_S)
            self._hurry.clear()

    def _succeeds(self, call: Callable[[], object]) -> bool:
        """Make a call.  False: it must be made again."""
        began_s = time.monotonic()
        try:
            call()
        except self._errors as error:
            if not self._refused(error):
                if not self._is_down:
                    took = f"after {time.monotonic() - began_s:.0f} s"
                    log.warning("%s failed %s, training goes on: %s", self._name, took, error)
                self._is_down = True
                return False
            log.warning("%s refused a call, which is dropped: %s", self._name, error)
        if self._is_down:
            log.warning("%s answers again: nothing was lost", self._name)
            self._is_down = False
        return True
