"""Flow: make the model and the data set that training starts from."""

from prefect import flow

from conf.run import RunConfig
from flows._config import as_config, run_name
from tasks.prepare import prepare_data, prepare_model, probe_rewards
from tlt_core.items.store import Ref
from tlt_core.run import preflight


@flow(name="prepare", flow_run_name=run_name)
def prepare(config: RunConfig | str, overrides: list[str] | None = None) -> Ref:
    """Reference of the data set: folder, number of training prompts, digest."""
    cfg = as_config(config, overrides)
    preflight.check_run(cfg)
    model = prepare_model(cfg)
    dataset = prepare_data(cfg, model)
    probe_rewards(cfg, model, dataset)
    return dataset
