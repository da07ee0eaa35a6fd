"""Flow: validate the newest checkpoint of a run, or its starting policy."""

import json
from pathlib import Path

from prefect import flow

from conf.run import RunConfig
from flows._config import as_config, as_policy, at_work, run_name
from tasks.coldstart import cold_start
from tasks.prepare import prepare_data, prepare_model
from tasks.step import evaluate as validate
from tlt_core.cluster.placement import check_cluster
from tlt_core.items.store import write_atomically
from tlt_core.run import preflight
from tlt_core.run.session import Session


@flow(name="evaluate", flow_run_name=run_name)
def evaluate(
    config: RunConfig | str, overrides: list[str] | None = None, *, policy: str | None = None
) -> dict[str, float]:
    """Validation metrics, also written to `runs/NAME/evaluation.json`.

    policy: folder of a policy to validate in place of the run's own.
    """
    cfg = as_config(config, overrides)
    preflight.check_run(cfg)
    check_cluster(cfg.cluster, workers_per_engine=cfg.rollout.workers_per_engine)
    with at_work(cfg) as (cfg, show):
        start = prepare_model(cfg)
        dataset = prepare_data(cfg, start)
        if policy is not None:
            start = as_policy(policy)
        elif cfg.coldstart.enabled:
            start = cold_start(cfg, start, dataset, show.stage).model_dir
        with Session.resume_or_init(
            cfg.for_reading(), data_dir=Path(dataset.path), start_model=start, on_progress=show, resume=policy is None
        ) as session:
            step = session.completed_steps
            metrics = validate(session, step)
    text = json.dumps({"step": step, "metrics": metrics}, indent=1)
    write_atomically(cfg.run_dir / "evaluation.json", lambda partial: partial.write_text(text))
    return metrics
