"""Where log lines go: the terminal and the run's log.txt.

The terminal shows INFO of this project and WARNING of everything else; log.txt has INFO of Prefect and tracebacks, too;
Prefect has INFO of this project, as the log of the flow run (`_environment.py` names the loggers).

With TLT_LOG_FORMAT=json each record is a JSON object on one line, and the file is log.jsonl.  Warnings, the error that
ends a command and uncaught exceptions are records then, too, and there is no live display.
"""

import json
import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import TextIO

from conf.load import ConfigError

_LOG_BYTES, _OLDER_LOGS = 50_000_000, 3  # log.txt, then log.txt.1 .. log.txt.3
OWN = ("flows", "tasks", "tlt_core", "kernels", "conf")
_where: dict[str, str | int] = {}  # run and step


def is_json() -> bool:
    """Raises ConfigError."""
    value = os.environ.get("TLT_LOG_FORMAT", "text")
    if value not in ("text", "json"):
        raise ConfigError(f"TLT_LOG_FORMAT={value!r}: choose text or json")
    return value == "json"


def at_step(step: int | None) -> None:
    """JSON records name this RL step from now on."""
    if step is None:
        _where.pop("step", None)
    else:
        _where["step"] = step


class JsonFormatter(logging.Formatter):
    """{"time": "2026-11-25T21:00:00.123+00:00", "level": "INFO", "logger": "tasks.track", "message": "...",
    "run": "demo", "step": 3}; `task` names Prefect's task, `exception` is a traceback.

    Prefect's console uses it as well (`_environment.py`), and makes it with a format.
    """

    def __init__(self, *_: object) -> None:
        super().__init__()

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, str | int] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **_where,
        }
        if task := getattr(record, "task_run_name", ""):
            line["task"] = task
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def _formatter(text: logging.Formatter) -> logging.Formatter:
    return JsonFormatter() if is_json() else text


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
    handler.setFormatter(_formatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S")))
    handler.addFilter(shown_on_terminal)
    logging.getLogger().addHandler(handler)
    for name in OWN:
        logging.getLogger(name).setLevel(logging.INFO)
    # Ray warns at every start that token authentication, the safe setting, is on.
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
    # urllib3 logs each retry towards a server that is down; `MlflowRun` reports it once.
    logging.getLogger("urllib3").setLevel(logging.ERROR)
    if is_json():
        logging.captureWarnings(True)
        log = logging.getLogger(__name__)
        sys.excepthook = lambda *error: log.critical("the command failed", exc_info=error)
        threading.excepthook = lambda failed: log.critical(
            "a thread failed", exc_info=(failed.exc_type, failed.exc_value or failed.exc_type(), failed.exc_traceback)
        )


class _RunLogHandler(RotatingFileHandler):
    """A full disk must end the run when saving fails, not when logging fails."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


@contextmanager
def run_log(run_dir: Path) -> Iterator[None]:
    """Copy all lines to the run's log file, with the traceback of an error that leaves the block."""
    run_dir.mkdir(parents=True, exist_ok=True)
    file = run_dir / ("log.jsonl" if is_json() else "log.txt")
    handler = _RunLogHandler(file, maxBytes=_LOG_BYTES, backupCount=_OLDER_LOGS, encoding="utf-8")
    # Prefect's records have the name of their task.
    line = "%(asctime)s %(levelname)-7s %(name)s: %(task_run_name)s %(message)s"
    handler.setFormatter(_formatter(logging.Formatter(line, defaults={"task_run_name": ""})))
    _where["run"] = run_dir.name
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
        _where.clear()


def log_file(run_dir: Path) -> Path | None:
    """The run's log: the newer one where both formats were used; None: there is none."""
    try:
        found = [file for name in ("log.txt", "log.jsonl") if (file := run_dir / name).is_file()]
    except OSError:  # the name is too long
        return None
    return max(found, key=lambda file: file.stat().st_mtime, default=None)


def shown_on_terminal(record: logging.LogRecord) -> bool:
    """Prefect's own reports of a failed task are left out: the command reports it once, in words."""
    own = record.name.partition(".")[0] in OWN
    if record.name.startswith(("prefect.flow_runs", "prefect.task_runs")):
        return False
    return own or record.levelno >= logging.WARNING
