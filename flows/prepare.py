"""Flow: start model and data set, ready for training."""

from prefect import flow

from conf.schema import RunConfig
from flows._config import as_config, run_name
from tasks.prepare import prepare_data, prepare_model
from tlt_core import preflight
from tlt_core.store import Ref


@flow(name="prepare", flow_run_name=run_name)
def prepare(config: RunConfig | str, overrides: list[str] | None = None) -> Ref:
    """Folder of the data set, its number of training prompts and its digest."""
    cfg = as_config(config, overrides)
    preflight.check_run(cfg)
    return prepare_data(cfg, prepare_model(cfg))
