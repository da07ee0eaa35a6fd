"""Environment variables of Prefect, MLflow, Ray and Hugging Face, set before they are imported.

Values that the user has set remain.  Prefect keeps its state in the project (`.prefect/`): runs share nothing with
other projects.
"""

import os
from pathlib import Path

from flows._logging import OWN, is_json

_JSON = {
    "PREFECT_LOGGING_HANDLERS_CONSOLE_FORMATTER": "json",
    "PREFECT_LOGGING_FORMATTERS_JSON_CLASS": "flows._logging.JsonFormatter",
    "TQDM_DISABLE": "1",  # bars between the lines
}
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
    for name, value in (_DEFAULTS | (_JSON if is_json() else {})).items():
        os.environ.setdefault(name, value)
