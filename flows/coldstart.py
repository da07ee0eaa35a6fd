"""Flow: the supervised training before RL on its own.  `train` includes it if the configuration enables it."""

from prefect import flow

from conf.run import RunConfig
from flows._config import as_config, at_work, run_name
from tasks.coldstart import ColdStarted, cold_start
from tasks.prepare import prepare_data, prepare_model
from tlt_core.cluster.placement import check_cluster
from tlt_core.run import preflight


@flow(name="coldstart", flow_run_name=run_name)
def coldstart(config: RunConfig | str, overrides: list[str] | None = None) -> ColdStarted:
    """Folder of the warmed-up model, and the stage's metrics."""
    cfg = as_config(config, overrides)
    preflight.check_run(cfg)
    check_cluster(cfg.cluster)
    with at_work(cfg) as (cfg, show):
        model_dir = prepare_model(cfg)
        dataset = prepare_data(cfg, model_dir)
        return cold_start(cfg, model_dir, dataset, show.stage)
