"""How a flow begins: its configuration (a deployment passes a YAML file's path, `tlt` a `RunConfig`), log, display."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prefect.runtime import flow_run

from conf.load import ConfigError, load
from conf.run import RunConfig
from flows._logging import run_log
from flows._stopping import Stopping
from flows._terminal import Terminal
from tlt_core.machine import precision
from tlt_core.run import engine_choice, preflight

MOST_STARTS = 5  # of one flow run: the server starts a crashed one again, see `_automations.py`


class GaveUp(RuntimeError):
    """The flow run was started too often: a failure and not a crash, so the server does not start it again."""


def as_config(config: RunConfig | str, overrides: list[str] | None) -> RunConfig:
    """The configuration, with its rollout engine settled.

    Raises ConfigError, CheckpointError, or GaveUp when this flow run has crashed too often.
    """
    if flow_run.run_count > MOST_STARTS:
        raise GaveUp(
            f"flow run {flow_run.name} was started {flow_run.run_count} times, {MOST_STARTS} are allowed; its log says "
            "why it crashes; then start a new flow run of the same configuration: it resumes from the newest checkpoint"
        )
    given = config if isinstance(config, RunConfig) else load(_of_project(config), overrides or ())
    return engine_choice.settle(given)


def checked(config: RunConfig | str, overrides: list[str] | None) -> RunConfig:
    """As `as_config`, and what can be checked before anything is computed is checked: `preflight.check_run`."""
    cfg = as_config(config, overrides)
    preflight.check_run(cfg)
    return cfg


@contextmanager
def at_work(cfg: RunConfig) -> Iterator[tuple[RunConfig, Terminal]]:
    """The configuration in this machine's precision, and the display; log and signals are those of a flow."""
    with Stopping(), run_log(cfg.run_dir), Terminal() as show:
        yield precision.settle(cfg), show


def _of_project(path: str) -> Path:
    """A flow run's parameters come from everybody who may start one: they must not make it read any other file."""
    file, project = Path(path), Path.cwd().resolve()
    if file.suffix not in (".yaml", ".yml") or not file.resolve().is_relative_to(project):
        raise ConfigError(
            f"config={path!r}: a flow run takes a .yaml or .yml file inside its working folder {project}, e.g. "
            "conf/demo.yaml; copy the file there, or change settings with `overrides`"
        )
    return file


def run_name() -> str:
    config = flow_run.parameters["config"]
    if isinstance(config, dict):  # from the form in Prefect's pages
        return str(config.get("name", "run"))
    return config.name if isinstance(config, RunConfig) else Path(str(config)).stem
