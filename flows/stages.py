"""Flows of single stages: `tlt prepare`, `coldstart`, `warmup`, `evaluate`, `export`; and a benchmark: `tlt bench`."""

import json
import pkgutil
from pathlib import Path
from typing import Any

from prefect import flow

from conf.load import ConfigError
from conf.run import RunConfig
from flows._config import at_work, checked, run_name
from flows._parser import Benchmark, benchmark_function
from flows._terminal import Terminal
from tasks.retrain import export_checkpoint, register_drafter
from tasks.stages import (
    cold_start,
    export_drafter,
    prepare_data,
    prepare_model,
    probe_rewards,
    project_of,
    version_folder,
    warm_up_drafter,
)
from tasks.step import evaluate as validate
from tlt_core.cluster.placement import check_cluster
from tlt_core.drafter.eagle3.model import default_taps
from tlt_core.export.folder import DRAFTER, POLICY
from tlt_core.export.record import Source
from tlt_core.items import checkpoint
from tlt_core.items.store import Ref, write_atomically
from tlt_core.machine import precision
from tlt_core.model.load import load_config
from tlt_core.run import reward_probe
from tlt_core.run.session import Session
from tlt_core.run.summary import last_step


@flow(name="prepare", flow_run_name=run_name)
def prepare(config: RunConfig | str, overrides: list[str] | None = None) -> tuple[Ref, list[str]]:
    """Make model and data set.  Reference of the data set (folder, number of training prompts, digest), and a page on
    it."""
    cfg = checked(config, overrides)
    model = prepare_model(cfg)
    dataset = prepare_data(cfg, model)
    probe_rewards(cfg, model, dataset)
    return dataset, reward_probe.page(cfg, data_dir=Path(dataset.path), model_dir=model)


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
            start = _named_policy(policy)
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


@flow(name="export", flow_run_name=run_name)
def export(
    config: RunConfig | str,
    overrides: list[str] | None = None,
    *,
    policy: str | None = None,
    drafter: str | None = None,
    out: str | None = None,
    num_prompts: int = 16,
    verifier: str | None = None,
    track: bool = False,
) -> Path:
    """Folder with `policy/` and `drafter-eagle3/`, which vLLM and SGLang load.

    policy: a folder within a run's folder; None: the run's own, at its newest checkpoint.  drafter: a folder; `none`:
    export the policy alone; None: the run's own.  out: default `exports/NAME`.  num_prompts: validation prompts on
    which acceptance and costs are measured.  verifier: target that the drafter's folder names.  track: version the
    folder with DVC and push it to the remote.
    """
    cfg = checked(config, overrides)
    if num_prompts < 0:
        raise ConfigError(f"num_prompts={num_prompts}: give the number of held-out prompts, 0 to measure nothing")
    if drafter is not None:
        _drafter_folder(cfg, drafter)  # report a wrong name before anything is computed
    out_dir = Path(out or f"exports/{cfg.name}")
    if track:
        project_of(out_dir)
    with at_work(cfg) as (cfg, show):
        start = prepare_model(cfg)
        dataset = prepare_data(cfg, start)
        if policy is not None:
            newest, run_dir = _named_policy(policy), Path(policy).parent
            step = last_step(run_dir)
        else:
            if cfg.coldstart.enabled:
                start, _ = cold_start(cfg, start, dataset, show.stage)
            newest, step = _newest_policy(cfg, start, dataset, show)
            run_dir = cfg.run_dir
        source = Source(newest, _drafter_folder(cfg, drafter), Path(dataset.path), step, run_dir)
        export_drafter(cfg, source, out_dir, num_prompts=num_prompts, verifier=verifier)
        if track:
            version_folder(out_dir)
        return out_dir


def _named_policy(folder: str) -> Path:
    if not (Path(folder) / "config.json").is_file():
        raise ConfigError(f"no policy at {folder}: name a Hugging Face folder, e.g. runs/NAME/policy")
    return Path(folder)


def _newest_policy(cfg: RunConfig, start: Path, dataset: Ref, show: Terminal) -> tuple[Path, int | None]:
    """Folder of the policy, and its RL steps if known.  A policy older than the newest checkpoint is exported again."""
    written = cfg.run_dir / POLICY
    with checkpoint.newest(cfg.run_dir / "checkpoints") as found:
        if found is None:
            return (written, None) if written.is_dir() else (start, 0)
        config, state = written / "config.json", found.folder / "state.json"
        if config.is_file() and config.stat().st_mtime >= state.stat().st_mtime:
            return written, found.state.step
    return export_checkpoint(cfg, start, dataset, show)  # of a running training: perhaps a newer checkpoint's


def _drafter_folder(cfg: RunConfig, given: str | None) -> Path | None:
    """Folder of the drafter to export, or None for none.  Raises ConfigError where it does not exist."""
    if given == "none":
        return None
    candidates = [given] if given else [cfg.run_dir / DRAFTER, cfg.rollout.speculation.drafter_path]
    for folder in (Path(c) for c in candidates if c is not None):
        if folder.is_dir():
            return folder
    raise ConfigError(
        f"no drafter at {given or cfg.run_dir / DRAFTER}: make one with 'tlt warmup CONFIG', name its folder with "
        "--drafter FOLDER, or export the policy alone with --drafter none"
    )


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
