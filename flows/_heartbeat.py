"""A line when nothing else has said anything for a while, so that nobody waits in the dark.

    log lines, of whoever --> OutputClock (a handler of the root logger) <-- Heartbeat's thread: how long ago?
                                                                              '-> logs the sentence it is given

The thread only reads and logs; it never delays a run, and its end is not waited for longer than a line takes.
"""

import logging
import threading
import time
from collections.abc import Callable

from flows._logging import shown_on_terminal

log = logging.getLogger(__name__)

QUIET_S = 12.0  # the promise is a line every 15 s: three are left for a thread that gets no processor
_LOOKS = 12  # in that time


class OutputClock(logging.Handler):
    """Knows when people were last told something.  One for the whole process: heartbeats that follow each other must
    not each begin to count anew."""

    def __init__(self) -> None:
        super().__init__()
        self.addFilter(shown_on_terminal)
        self._last_s = time.monotonic()

    def emit(self, record: logging.LogRecord) -> None:
        self._last_s = time.monotonic()

    def quiet_s(self) -> float:
        """Seconds since then."""
        return time.monotonic() - self._last_s


class Heartbeat:
    """Context manager.  `sentence` says what is going on; it is asked by another thread."""

    def __init__(self, sentence: Callable[[], str], *, quiet_s: float | None = None) -> None:
        """quiet_s: silence after which a line is due; None: QUIET_S."""
        self._sentence, self._quiet_s = sentence, QUIET_S if quiet_s is None else quiet_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)

    def __enter__(self) -> "Heartbeat":
        self._clock = _clock()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(timeout=1.0)  # it may be writing to a pipe that nobody reads

    def _watch(self) -> None:
        while not self._ended.wait(self._quiet_s / _LOOKS):
            if self._clock.quiet_s() >= self._quiet_s:
                log.info("%s", self._sentence())


def _clock() -> OutputClock:
    root = logging.getLogger()
    found = next((h for h in root.handlers if isinstance(h, OutputClock)), None)
    if found is None:
        found = OutputClock()
        root.addHandler(found)
    return found
