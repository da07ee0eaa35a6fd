"""Flow: train the first drafter, for a run's policy or for the policy that the run starts from."""

from pathlib import Path

from prefect import flow

from conf.run import RunConfig
from flows._config import as_config, at_work, run_name
from tasks.coldstart import cold_start
from tasks.prepare import prepare_data, prepare_model
from tasks.register import register_drafter
from tasks.warmup import warm_up_drafter
from tlt_core.drafter.eagle3.model import default_taps
from tlt_core.model.load import load_config
from tlt_core.run import preflight


@flow(name="warmup", flow_run_name=run_name)
def warmup(
    config: RunConfig | str, overrides: list[str] | None = None, *, out: str | None = None
) -> tuple[Path, dict[str, float]]:
    """Folder of the drafter, and its metrics.  out: default `runs/NAME/drafter-eagle3`."""
    cfg = as_config(config, overrides)
    preflight.check_run(cfg)
    with at_work(cfg) as (cfg, show):
        policy = prepare_model(cfg)
        default_taps(load_config(policy).num_layers)  # raises where there can be no drafter, before a cold start
        dataset = prepare_data(cfg, policy)
        trained = cfg.run_dir / "policy"
        if trained.is_dir():
            policy = trained
        elif cfg.coldstart.enabled:
            policy = cold_start(cfg, policy, dataset, show.stage).model_dir
        out_dir = Path(out) if out else cfg.run_dir / "drafter-eagle3"  # vLLM takes the method from the folder's name
        metrics = warm_up_drafter(cfg, policy, dataset, out_dir, show.stage)
        register_drafter(cfg, out_dir, policy, dataset, metrics, tracker_run_id="")
        return out_dir, metrics
