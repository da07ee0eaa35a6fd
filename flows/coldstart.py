"""Flow: the supervised training before RL on its own.  `train` includes it if the configuration enables it."""

from prefect import flow

from conf.run import RunConfig
from flows._config import as_config, run_name
from flows._logging import run_log
from flows._stopping import Stopping
from flows._terminal import Terminal
from tasks.coldstart import ColdStarted, cold_start
from tasks.prepare import prepare_data, prepare_model
from tlt_core.cluster.placement import check_cluster
from tlt_core.machine import precision
from tlt_core.run import preflight


@flow(name="coldstart", flow_run_name=run_name)
def coldstart(config: RunConfig | str, overrides: list[str] | None = None) -> ColdStarted:
    """Folder of the warmed-up model, and the stage's metrics."""
    cfg = as_config(config, overrides)
    preflight.check_run(cfg)
    check_cluster(cfg.cluster)
    with Stopping(), run_log(cfg.run_dir), Terminal() as show:
        cfg = precision.settle(cfg)
        model_dir = prepare_model(cfg)
        dataset = prepare_data(cfg, model_dir)
        return cold_start(cfg, model_dir, dataset, show.stage)
