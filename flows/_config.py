"""The first arguments of a flow: a `RunConfig`, or the path of a YAML file with overrides, as deployments pass it."""

from pathlib import Path

from prefect.runtime import flow_run

from conf.load import ConfigError, load
from conf.run import RunConfig
from flows import _attempts
from tlt_core.run import engine_choice


def as_config(config: RunConfig | str, overrides: list[str] | None) -> RunConfig:
    """The configuration, with its rollout engine settled.

    Raises ConfigError, CheckpointError, or GaveUp when this flow run has crashed too often."""
    _attempts.check()
    given = config if isinstance(config, RunConfig) else load(_of_project(config), overrides or ())
    return engine_choice.settle(given)


def _of_project(path: str) -> Path:
    """A flow run's parameters come from everybody who may start one: they must not make it read any other file."""
    file, project = Path(path), Path.cwd().resolve()
    if file.suffix not in (".yaml", ".yml") or not file.resolve().is_relative_to(project):
        raise ConfigError(
            f"config={path!r}: a flow run takes a .yaml or .yml file inside its working folder {project}, e.g. "
            "conf/demo.yaml; copy the file there, or change settings with `overrides`"
        )
    return file


def as_policy(folder: str) -> Path:
    """Folder of a policy that the user named.  Raises ConfigError where there is none."""
    if not (Path(folder) / "config.json").is_file():
        raise ConfigError(f"no policy at {folder}: name a Hugging Face folder, e.g. runs/NAME/policy")
    return Path(folder)


def run_name() -> str:
    """Name of the flow run: that of the training run."""
    config = flow_run.parameters["config"]
    if isinstance(config, dict):  # from the form in Prefect's pages
        return str(config.get("name", "run"))
    return config.name if isinstance(config, RunConfig) else Path(str(config)).stem
