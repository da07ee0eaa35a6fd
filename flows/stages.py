"""Flows of single stages: `tlt prepare`, `coldstart`, `warmup`, `evaluate`; and a benchmark, which `tlt bench` runs."""

import json
import pkgutil
from pathlib import Path
from typing import Any

from prefect import flow

from conf.run import RunConfig
from flows._config import as_policy, at_work, checked, run_name
from flows._parser import Benchmark, benchmark_function
from tasks.retrain import register_drafter
from tasks.stages import cold_start, prepare_data, prepare_model, probe_rewards, warm_up_drafter
from tasks.step import evaluate as validate
from tlt_core.cluster.placement import check_cluster
from tlt_core.drafter.eagle3.model import default_taps
from tlt_core.items.store import Ref, write_atomically
from tlt_core.machine import precision
from tlt_core.model.load import load_config
from tlt_core.run.session import Session


@flow(name="prepare", flow_run_name=run_name)
def prepare(config: RunConfig | str, overrides: list[str] | None = None) -> Ref:
    """Make model and data set.  Reference of the data set: folder, number of training prompts, digest."""
    cfg = checked(config, overrides)
    model = prepare_model(cfg)
    dataset = prepare_data(cfg, model)
    probe_rewards(cfg, model, dataset)
    return dataset


@flow(name="coldstart", flow_run_name=run_name)
def coldstart(config: RunConfig | str, overrides: list[str] | None = None) -> tuple[Path, dict[str, float]]:
    """Folder of the warmed-up model, and the stage's metrics.  `train` includes it if the configuration enables it."""
    cfg = checked(config, overrides)
    check_cluster(cfg.cluster)
    with at_work(cfg) as (cfg, show):
        model_dir = prepare_model(cfg)
        dataset = prepare_data(cfg, model_dir)
        return cold_start(cfg, model_dir, dataset, show.stage)


@flow(name="warmup", flow_run_name=run_name)
def warmup(
    config: RunConfig | str, overrides: list[str] | None = None, *, out: str | None = None
) -> tuple[Path, dict[str, float]]:
    """Train the first drafter, for a run's policy or for the one that the run starts from: its folder and metrics.

    out: default `runs/NAME/drafter-eagle3`.
    """
    cfg = checked(config, overrides)
    with at_work(cfg) as (cfg, show):
        policy = prepare_model(cfg)
        default_taps(load_config(policy).num_layers)  # raises where there can be no drafter, before a cold start
        dataset = prepare_data(cfg, policy)
        trained = cfg.run_dir / "policy"
        if trained.is_dir():
            policy = trained
        elif cfg.coldstart.enabled:
            policy, _ = cold_start(cfg, policy, dataset, show.stage)
        out_dir = Path(out) if out else cfg.run_dir / "drafter-eagle3"  # vLLM takes the method from the folder's name
        metrics = warm_up_drafter(cfg, policy, dataset, out_dir, show.stage)
        register_drafter(cfg, out_dir, policy, dataset, metrics, tracker_run_id="")
        return out_dir, metrics


@flow(name="evaluate", flow_run_name=run_name)
def evaluate(
    config: RunConfig | str, overrides: list[str] | None = None, *, policy: str | None = None
) -> dict[str, float]:
    """Validate the newest checkpoint of a run, or its starting policy: metrics, also in `runs/NAME/evaluation.json`.

    policy: folder of a policy to validate in place of the run's own.
    """
    cfg = checked(config, overrides)
    check_cluster(cfg.cluster, workers_per_engine=cfg.rollout.workers_per_engine)
    with at_work(cfg) as (cfg, show):
        start = prepare_model(cfg)
        dataset = prepare_data(cfg, start)
        if policy is not None:
            start = as_policy(policy)
        elif cfg.coldstart.enabled:
            start, _ = cold_start(cfg, start, dataset, show.stage)
        with Session.resume_or_init(
            cfg.for_reading(), data_dir=Path(dataset.path), start_model=start, on_progress=show, resume=policy is None
        ) as session:
            step = session.completed_steps
            metrics = validate(session, step)
    text = json.dumps({"step": step, "metrics": metrics}, indent=1)
    write_atomically(cfg.run_dir / "evaluation.json", lambda partial: partial.write_text(text))
    return metrics


@flow(name="benchmark")
def measure(
    config: RunConfig | str,
    benchmark: Benchmark = "step",
    repeats: int = 3,
    overrides: list[str] | None = None,
) -> dict[str, Any]:
    """Measure, judge and write `reports/BENCHMARK.json`; returns the report."""
    bench = pkgutil.resolve_name(benchmark_function(benchmark))
    cfg = precision.settle(checked(config, overrides))
    command = f"prefect deployment run benchmark/benchmark -p benchmark={benchmark} -p repeats={repeats}"
    report: dict[str, Any] = bench(cfg, repeats=repeats, out=Path("reports") / f"{benchmark}.json", command=command)
    return report
