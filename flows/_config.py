"""A flow's first argument: a `RunConfig`, or the path of a YAML file with overrides (as a deployment passes it)."""

from pathlib import Path

from prefect.runtime import flow_run

from conf.load import load
from conf.schema import RunConfig
from flows import _attempts


def as_config(config: RunConfig | str, overrides: list[str] | None) -> RunConfig:
    """Raises ConfigError, or GaveUp when this flow run has crashed too often."""
    _attempts.check()
    return config if isinstance(config, RunConfig) else load(config, overrides or ())


def run_name() -> str:
    """Name of the flow run: the run's own name."""
    config = flow_run.parameters["config"]
    if isinstance(config, dict):  # from the form in Prefect's pages
        return str(config.get("name", "run"))
    return config.name if isinstance(config, RunConfig) else Path(str(config)).stem
