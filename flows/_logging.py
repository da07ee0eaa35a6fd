"""Where log lines go: the terminal and the run's log.txt.

terminal   INFO of this project, WARNING of everything else
log.txt    INFO of this project and of Prefect, WARNING of the rest, tracebacks included
Prefect    INFO of this project, as the log of the flow run (`_environment.py` names the loggers)
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import TextIO

_LOG_BYTES, _OLDER_LOGS = 50_000_000, 3  # log.txt, then log.txt.1 .. log.txt.3
OWN = ("flows", "tasks", "tlt_core", "kernels", "conf")


class TerminalHandler(logging.StreamHandler[TextIO]):
    """Writes to the current sys.stderr, so that lines appear above a live display.

    Prefect takes over the root logger unless one of its handlers is of a class without a leading underscore.
    """

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, _: TextIO) -> None:
        pass


def attach_terminal() -> None:
    """Show log lines on the terminal.  Call it before Prefect is imported, which then leaves the root logger alone."""
    handler = TerminalHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    handler.addFilter(shown_on_terminal)
    logging.getLogger().addHandler(handler)
    for name in OWN:
        logging.getLogger(name).setLevel(logging.INFO)
    # Ray warns at every start that token authentication, the safe setting, is on.
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
    # urllib3 logs each retry towards a server that is down; `MlflowRun` reports it once.
    logging.getLogger("urllib3").setLevel(logging.ERROR)


class _RunLogHandler(RotatingFileHandler):
    """A full disk must end the run when saving fails, not when logging fails."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


@contextmanager
def run_log(run_dir: Path) -> Iterator[None]:
    """Copy all lines to `run_dir/log.txt`, with the traceback of an error that leaves the block."""
    run_dir.mkdir(parents=True, exist_ok=True)
    handler = _RunLogHandler(run_dir / "log.txt", maxBytes=_LOG_BYTES, backupCount=_OLDER_LOGS, encoding="utf-8")
    # Prefect's records have the name of their task.
    line = "%(asctime)s %(levelname)-7s %(name)s: %(task_run_name)s %(message)s"
    handler.setFormatter(logging.Formatter(line, defaults={"task_run_name": ""}))
    root = logging.getLogger()
    root.addHandler(handler)
    for name in (*OWN, "prefect"):
        logging.getLogger(name).setLevel(logging.INFO)
    try:
        yield
    except BaseException:
        record = root.makeRecord(__name__, logging.ERROR, __file__, 0, "the run ended here", (), sys.exc_info())
        handler.handle(record)
        raise
    finally:
        root.removeHandler(handler)
        handler.close()


def shown_on_terminal(record: logging.LogRecord) -> bool:
    """Prefect's own reports of a failed task are left out: the command reports it once, in words."""
    own = record.name.partition(".")[0] in OWN
    if record.name.startswith(("prefect.flow_runs", "prefect.task_runs")):
        return False
    return own or record.levelno >= logging.WARNING
