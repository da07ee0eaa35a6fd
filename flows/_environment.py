"""Environment variables of Prefect, MLflow, Ray and Hugging Face, set before they are imported.

Values that the user has set remain; `no_proxy` gets this machine besides.  Prefect keeps its state in the project
(`.prefect/`): runs share nothing with other projects.
"""

import os
import sys
from pathlib import Path

from flows._logging import OWN, is_json

_JSON = {
    "PREFECT_LOGGING_HANDLERS_CONSOLE_FORMATTER": "json",
    "PREFECT_LOGGING_FORMATTERS_JSON_CLASS": "flows._logging.JsonFormatter",
}
NO_BARS = {"TQDM_DISABLE": "1"}  # of libraries, which redraw a line: in a file they are one line of kilobytes
_THIS_MACHINE = ("127.0.0.1", "localhost", "::1")
_DEFAULTS = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_LOGGING_LEVEL": "INFO",
    "PREFECT_LOGGING_EXTRA_LOGGERS": ",".join(OWN),
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",  # lines logged before the flow run begins
    "DO_NOT_TRACK": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "RAY_USAGE_STATS_ENABLED": "0",
    "DVC_NO_ANALYTICS": "1",
    "TOKENIZERS_PARALLELISM": "false",  # its threads do not survive a fork, and warn about it
}


def set_defaults() -> None:
    """Call once, first thing in a command.  Raises ConfigError."""
    os.environ.setdefault("PREFECT_HOME", str(Path(".prefect").absolute()))
    has_display = sys.stderr.isatty() and not is_json()
    for name, value in (_DEFAULTS | (_JSON if is_json() else {}) | ({} if has_display else NO_BARS)).items():
        os.environ.setdefault(name, value)
    _reach_this_machine_directly()


def _reach_this_machine_directly() -> None:
    """A proxy of the user's network (http_proxy, all_proxy) cannot reach services that run here."""
    given = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""  # where both are set, the first one counts
    hosts = [host.strip() for host in given.split(",") if host.strip()]
    hosts += [host for host in _THIS_MACHINE if host not in hosts and "*" not in hosts]
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(hosts)  # some libraries read only one of them
