"""SIGTERM and Ctrl-C end a flow in order: workers end, files are whole, Prefect and MLflow hear of it.

Both raise KeyboardInterrupt, the one exception that Ray's calls pass on.  Prefect's handler of SIGTERM raises another
one, by which it knows a cancelled run; so it is called last, when Ray has ended (`Stopping.__exit__`).  A Prefect
worker kills a flow at once whose handler is not Prefect's own: there it stays, and `stopped_by` finds its exception
again, which Ray turns into a SystemError.
"""

import logging
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

log = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_WORKER = "PREFECT__FLOW_RUN_ID"  # set by a Prefect worker for the processes of its flows
_received: list[int] = []


def exit_code() -> int:
    """Of a process that a signal ends: 143 for SIGTERM, 130 for Ctrl-C."""
    return 128 + (_received[0] if _received else signal.SIGINT)


def end_at_once(number: int, _: FrameType | None = None) -> None:
    """Handler of both signals outside of flows."""
    _received.append(number)
    raise KeyboardInterrupt


def stopped_by(error: BaseException | None) -> BaseException | None:
    """The exception of a signal that ended a flow, or None where something else did."""
    if isinstance(error, SystemError):  # C code that has overlooked an exception
        error = error.__cause__
    elif isinstance(error, Exception) and isinstance(error.__context__, KeyboardInterrupt):  # Prefect, as it notes one
        error = error.__context__
    return None if isinstance(error, Exception) else error


class Stopping:
    """Context manager around what a flow does; in another thread than the main one it does nothing."""

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._seconds: Callable[[], float] = lambda: 0.0
        self._alarm: threading.Timer | None = None
        self._number: int | None = None

    def may_finish_step(self, seconds: Callable[[], float]) -> None:
        """From now on the first signal only sets `requested`, for so many seconds; then, or at the second, it ends."""
        self._seconds = seconds

    @property
    def requested(self) -> bool:
        return self._number is not None

    def __enter__(self) -> "Stopping":
        if threading.current_thread() is threading.main_thread():
            ours = [number for number in _SIGNALS if number != signal.SIGTERM or _WORKER not in os.environ]
            self._before = {number: signal.signal(number, self._on_signal) for number in ours}
        return self

    def __exit__(self, error_type: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        before, signalled = self._before.get(signal.SIGTERM), stopped_by(error)
        if self._number == signal.SIGTERM and isinstance(signalled, KeyboardInterrupt) and callable(before):
            before(self._number, None)
        if signalled is not None and signalled is not error:
            raise signalled from None

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        is_first, self._number = self._number is None, self._number or number
        _received.append(number)
        left_s = self._seconds()
        if not is_first or left_s <= 0:
            raise KeyboardInterrupt
        log.warning(
            "%s: the run ends when this step is saved, at the latest in %.0f s; a second signal ends it now",
            signal.Signals(number).name,
            left_s,
        )
        self._alarm = threading.Timer(left_s, os.kill, (os.getpid(), number))
        self._alarm.daemon = True
        self._alarm.start()
