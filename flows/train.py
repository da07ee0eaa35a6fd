"""Flow: reinforcement learning with verifiable rewards.

    for each step:  rollout -> reward -> policy update -> publish -> evaluate -> checkpoint -> track
                      '-> idle workers begin the update, train the drafter -> publish drafter

Starting the same configuration again resumes its run.  Nothing numerical is decided here.
"""

import logging
from pathlib import Path

from prefect import flow

from conf.run import RunConfig
from flows._announcement import Took, announce
from flows._artifacts import RunPage
from flows._config import checked, run_name
from flows._logging import at_step, run_log
from flows._stopping import Stopping
from flows._terminal import Terminal
from tasks.retrain import register_drafter, register_policy
from tasks.stages import cold_start, prepare_data, prepare_model, probe_rewards, warm_up_drafter
from tasks.step import (
    checkpoint,
    compare_with_plain,
    evaluate,
    export_policy,
    publish,
    publish_drafter,
    resample,
    reward,
    rollout,
    update_policy,
)
from tasks.track import Tracker, track
from tlt_core.cluster.placement import check_cluster
from tlt_core.items.store import Ref
from tlt_core.items.types import ScoredBatch
from tlt_core.machine import precision, provenance
from tlt_core.machine.file_lock import exclusive
from tlt_core.run.session import Session

log = logging.getLogger(__name__)


@flow(name="train", flow_run_name=run_name)
def train(config: RunConfig | str, overrides: list[str] | None = None) -> Path:
    """Train the policy; returns its Hugging Face folder."""
    took = Took()
    cfg = checked(config, overrides)
    check_cluster(cfg.cluster, workers_per_engine=cfg.rollout.workers_per_engine)
    with (
        Stopping() as stopping,
        exclusive(cfg.run_dir / "lock", wait=True),
        run_log(cfg.run_dir),
        Terminal(cfg.run_dir) as show,
    ):
        cfg = precision.settle(cfg)
        announce(cfg)
        provenance.begin_attempt(cfg)
        took.lap("start")
        show.begin("model and data")
        policy = prepare_model(cfg)
        dataset = prepare_data(cfg, policy)
        probe_rewards(cfg, policy, dataset)
        took.lap("model and data")
        warm_up: dict[str, float] = {}
        if cfg.coldstart.enabled:
            policy, warm_up = cold_start(cfg, policy, dataset, show.stage)
            took.lap("cold start")
        if cfg.needs_first_drafter:
            folder = cfg.run_dir / "drafter-eagle3"  # vLLM takes the method from the folder's name
            if not folder.is_dir():
                warm_up = {**warm_up, **warm_up_drafter(cfg, policy, dataset, folder, show.stage)}
            cfg = cfg.with_drafter(folder)
            took.lap("first drafter")
        with (
            Session.resume_or_init(cfg, data_dir=Path(dataset.path), start_model=policy, on_progress=show) as session,
            Tracker(session, dataset=dataset) as tracker,
        ):
            took.lap("workers")
            stopping.may_finish_step(session.seconds_left_for_step)
            iterate(session, tracker, warm_up, show, took, stopping)
            trained = export_policy(session)
            show.begin("registry")
            register(session, trained, dataset, tracker_run_id=tracker.mlflow.run_id)
            took.lap("end")
            tracker.outcome(took.metrics())
            provenance.end_attempt(cfg.run_dir, took_s=took.stages)
            log.info("%s", took.in_words())
            if learnt := tracker.learning():
                log.info("learning: %s", learnt)
            log.info("verdict: %s", tracker.verdict())
            return trained


def iterate(
    session: Session, tracker: Tracker, warm_up: dict[str, float], show: Terminal, took: Took, stopping: Stopping
) -> None:
    """Validate the start policy of a fresh run; then the remaining RL steps."""
    page = RunPage(run_name=session.cfg.name, num_steps=session.cfg.num_steps)
    page.begin(done=session.completed_steps, mlflow_run=tracker.mlflow)
    if session.completed_steps == 0:
        session.begin_step(0)
        if session.validation.is_due(0):
            evaluate(session, 0)
        tracker.record({**warm_up, **session.metrics.values()}, step=0)
        took.step(session.metrics.values())
    for step in session.remaining_steps():
        tracker.begin_step()
        session.begin_step(step)
        at_step(step)
        scored = sample(session, step)
        if session.cfg.compares_with_plain(step):
            compare_with_plain(session, step)
        update_policy(session, step, scored)
        publish(session, step)
        if session.validation.is_due(step):
            evaluate(session, step)
        if session.checkpoint_due(step) or stopping.requested:
            checkpoint(session, step)
        show.begin("figures and metrics")
        metrics = track(session, tracker, step, scored)
        took.step(metrics)
        show.step_done(metrics)
        page.step_done(step, metrics)
        if stopping.requested and session.completed_steps == step:
            raise KeyboardInterrupt  # as the signal, had there been no step to finish
    at_step(None)
    page.end()


def register(session: Session, policy: Path, dataset: Ref, *, tracker_run_id: str) -> None:
    """Register the policy and the drafter trained beside it in MLflow."""
    cfg, metrics = session.cfg, session.metrics.values() or session.resumed_metrics
    if not cfg.tracking.register_models:
        return
    register_policy(cfg, policy, dataset, metrics, tracker_run_id)
    drafter = cfg.run_dir / "drafter-eagle3"
    if cfg.rollout.speculation.drafter_path is not None and drafter.is_dir():
        register_drafter(cfg, drafter, policy, dataset, metrics, tracker_run_id)


def sample(session: Session, step: int) -> ScoredBatch:
    """Scored groups of one step; dynamic sampling may take several rollouts."""
    rollouts = rollout(session, step)
    scored = reward(session, step, rollouts)
    publish_drafter(session, step)
    while session.needs_more_groups(scored):
        scored = resample(session, step, scored)
    return scored
