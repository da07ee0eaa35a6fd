"""`tlt bench idle`: what training the drafter in idle time costs a step.

Each rollout of a training run is decoded twice: with training of the drafter, and without it (nothing is trained, no
hidden states are kept).  Which comes first alternates.  Both give the same tokens with the same drafter, so their
difference is the cost of training: workers that decode share memory and caches with workers that train, the phase ends
with the last micro-step, and the drafter is published.  The rest of the step is measured once for both; writing hidden
states to disk in the background is not counted.  The two rollouts are seconds apart, so other load on the machine
affects both.

`tlt bench spot` and `tlt bench e2e` measure the gain over a whole run.
"""

import shutil
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from prefect import flow

from bench.report import Bound, judge, write_report
from bench.runs import first_drafter, variants
from bench.verdicts import summarise
from conf.run import RunConfig
from flows._terminal import Terminal
from tasks.prepare import prepare_data, prepare_model
from tlt_core.items.types import RolloutBatch
from tlt_core.run.rollout_phase import requests_for
from tlt_core.run.session import Session

_FIGURES = (
    "with_s",
    "without_s",
    "publish_s",
    "step_s",
    "rollout_ratio",
    "step_ratio",
    "idle/harvested_s",
    "idle/harvested_ratio",
    "idle/preempt_ms_p95",
    "drafter/trained_tokens",
)


@flow(name="bench-idle")
def bench_idle(cfg: RunConfig, *, repeats: int, out: Path, command: str) -> dict[str, Any]:
    """Measure `repeats` steps after a first one that warms up; returns the report."""
    first, policy_dir = first_drafter(cfg)
    run = variants(cfg, first)["trained"].model_copy(
        update={"name": f"bench-{cfg.name}-idle", "num_steps": repeats + 1}
    )
    shutil.rmtree(run.run_dir, ignore_errors=True)
    steps: list[dict[str, float]] = []
    with Terminal() as show:
        dataset = Path(prepare_data(run, prepare_model(run)).path)
        with Session.resume_or_init(run, data_dir=dataset, start_model=policy_dir, on_progress=show) as session:
            for step in session.remaining_steps():
                steps.append(_step(session, step))
    return write_report(out, command=command, repeats=repeats, rows=_rows(steps[1:]), verdicts=_verdicts(steps[1:]))


def _step(session: Session, step: int) -> dict[str, float]:
    """One RL step with two rollouts; returns its figures."""
    session.begin_step(step)
    began_s, cursor = time.perf_counter(), session.order.cursor
    if step % 2 == 0:
        rehearsed, without_s = _rehearse(session, step)
        session.order.cursor = cursor
    rollouts = session.sample_step(step)
    if step % 2:
        session.order.cursor = cursor
        rehearsed, without_s = _rehearse(session, step)
    session.drafter.publish(step)
    session.update(step, session.score(step, rollouts))
    session.publish(step)
    whole_s, metrics = time.perf_counter() - began_s, session.metrics.values()
    with_s = metrics["timing_s/gen"]
    publish_s = metrics.get("timing_s/publish_drafter", 0.0)
    step_s = whole_s - without_s
    return {
        **metrics,
        "with_s": with_s,
        "without_s": without_s,
        "publish_s": publish_s,
        "step_s": step_s,
        "rollout_ratio": with_s / without_s,
        "step_ratio": step_s / (step_s - with_s - publish_s + without_s),
        "same": float(torch.equal(rollouts.tokens_T, rehearsed.tokens_T)),
    }


def _rehearse(session: Session, step: int) -> tuple[RolloutBatch, float]:
    """The responses of `sample_step` and their seconds, without training the drafter.

    Nothing but the tuner learns from them: the n-gram drafter has a memory for rehearsals alone, and `sample_step` has
    the same responses scored.
    """
    session.group.exchange_ngrams()
    began_s = time.perf_counter()
    cfg = session.cfg
    prompts = session.order.take(cfg.rollout.num_prompts)
    requests = requests_for(prompts, cfg.rollout.num_samples, seed=cfg.seed, step=step)
    rollouts = session.rollout.decode(requests, session.params, phase="rehearse", step=step)
    seconds = time.perf_counter() - began_s
    session.group.exchange_ngrams()
    while not session.scoring.is_ready(rollouts, within_s=1.0):
        pass
    return rollouts, seconds


def _rows(steps: Sequence[Mapping[str, float]]) -> list[dict[str, Any]]:
    return [{"configuration": "steps", **summarise(steps, _FIGURES)}, {"configuration": "all steps", **_whole(steps)}]


def _whole(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Ratios of sums over the steps, and the standard error of `step_ratio`."""
    with_s, without_s = sum(s["with_s"] for s in steps), sum(s["without_s"] for s in steps)
    step_s, publish_s = sum(s["step_s"] for s in steps), sum(s["publish_s"] for s in steps)
    plain_s = step_s - publish_s - with_s + without_s
    costs = [s["with_s"] + s["publish_s"] - s["without_s"] for s in steps]
    error_s = statistics.stdev(costs) * len(costs) ** 0.5 if len(costs) > 1 else 0.0
    return {
        "same_steps": sum(s["same"] for s in steps) / len(steps),
        "rollout_ratio": with_s / without_s,
        "step_ratio": step_s / plain_s,
        "step_ratio_error": error_s / plain_s,
    }


def _verdicts(steps: Sequence[Mapping[str, float]]) -> list[dict[str, Any]]:
    whole = _whole(steps)
    cost = Bound("step time, training in idle time over none, all steps", "step_ratio", 1.01, at_least=False)
    same = Bound("share of steps with the same tokens with and without", "same_steps", 1.0, at_least=True)
    return judge([whole], [cost, same])
