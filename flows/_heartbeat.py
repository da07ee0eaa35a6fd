"""A log line whenever nothing was shown for a while.  The thread only reads and logs, and never delays a run."""

import logging
import threading
import time
from collections.abc import Callable

from flows._logging import shown_on_terminal

log = logging.getLogger(__name__)

QUIET_S = 12.0  # promised is a line every 15 s; three seconds of reserve on a busy machine
_LOOKS = 12  # checks in that time


class _OutputClock(logging.Handler):
    """Knows when the last line was shown."""

    def __init__(self) -> None:
        super().__init__()
        self.addFilter(shown_on_terminal)
        self.last_s = time.monotonic()

    def emit(self, record: logging.LogRecord) -> None:
        self.last_s = time.monotonic()


clock = _OutputClock()  # one per process, so that a new heartbeat does not start at zero


class Heartbeat:
    """Context manager.  `sentence` returns what is going on; another thread calls it."""

    def __init__(self, sentence: Callable[[], str], *, quiet_s: float | None = None) -> None:
        """quiet_s: seconds of silence before a line; None: QUIET_S."""
        self._sentence, self._quiet_s = sentence, QUIET_S if quiet_s is None else quiet_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)

    def __enter__(self) -> "Heartbeat":
        root = logging.getLogger()
        if clock not in root.handlers:
            clock.last_s = time.monotonic()
            root.addHandler(clock)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(timeout=1.0)  # the thread may hang on a pipe that nobody reads

    def _watch(self) -> None:
        while not self._ended.wait(self._quiet_s / _LOOKS):
            if time.monotonic() - clock.last_s >= self._quiet_s:
                log.info("%s", self._sentence())
