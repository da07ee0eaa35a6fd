"""Which drafter the engines draft with: publishes what idle workers have trained, unless it drafts worse.

    rollout phase --observe--> DrafterPublisher --publish--> all workers       (the rule: `decide`)
          ^--- idle_training_settings: when idle workers train

Workers train apart, from the weights in use.  Each tries its candidate on its own held-back responses
(`idle_training/candidate`).  One that is not worse is published as it is; of several the average, weighted by the
tokens they trained on, is tried on all workers first.  A candidate is worse when it gets fewer tokens accepted, by more
than chance explains (`idle_training/comparison`): a drafter that is not replaced goes stale.
"""

import json
import logging
import shutil
from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

from conf.run import RunConfig
from tlt_core.cluster.drafting import DrafterPublished
from tlt_core.cluster.group import WorkerGroup
from tlt_core.drafter.kinds import learned_in, strategies_of
from tlt_core.idle_training.comparison import Comparison
from tlt_core.idle_training.coordinator import IdleTrainingSettings, PhaseReport, bubble
from tlt_core.idle_training.training import IdleTrainingResult
from tlt_core.items.checkpoint import DriverState
from tlt_core.items.store import read_json, write_atomically
from tlt_core.run.progress import Reporter
from tlt_core.run.step_metrics import StepMetrics

log = logging.getLogger(__name__)


class Decision(NamedTuple):
    shares: tuple[float, ...]  # of each worker in what is published; all 0: nothing is
    measured: Comparison | None  # trial of what is published; None: nobody has tried the sum yet
    refused: bool  # there were candidates, all worse than the drafter in use
    reason: str


def decide(results: Sequence[IdleTrainingResult], *, errors: float) -> Decision:
    """results: of all workers, by rank.  errors: see `Comparison.is_worse`."""
    nothing = (0.0,) * len(results)
    trials = [r.trial for r in results if r.trial is not None]
    if not trials:
        unmeasured = "no candidate was measured: too little time, or nothing held back"
        return Decision(nothing, None, False, unmeasured if any(r.rows for r in results) else "not trained")
    fit = [r.trial is not None and not r.trial.is_worse(errors=errors) for r in results]
    if not any(fit):
        return Decision(nothing, None, True, _why_refused(max(trials, key=lambda t: t.gain)))
    weights = [max(r.rows, 1) if fits else 0 for r, fits in zip(results, fit, strict=True)]
    shares = tuple(weight / sum(weights) for weight in weights)
    return Decision(shares, results[fit.index(True)].trial if sum(fit) == 1 else None, False, "published")


def published_dir(run_dir: Path, step: int) -> Path:
    """Folder of the drafter that was published in a step, where `drafter.idle_training.keep_published` keeps it."""
    return run_dir / "drafters" / f"{step:06d}-eagle3"


def _why_refused(trial: Comparison) -> str:
    return (
        f"refused: acceptance length {trial.candidate_length:.3f} on {trial.starts:.0f} held-back tokens of "
        f"{trial.groups:.0f} prompts, {trial.used_length:.3f} in use; the difference is {trial.gain:.3f} "
        f"+- {trial.error:.3f}"
    )


def _training_metrics(results: Sequence[IdleTrainingResult], of_average: Comparison | None) -> dict[str, float]:
    """`drafter/*` of one step.  of_average: the trial of what was published, where all workers tried it."""
    rows = sum(r.rows for r in results)
    metrics = {
        "drafter/trained_tokens": float(rows),
        "drafter/optimizer_steps": float(sum(r.steps for r in results)),
        "drafter/optimizer_steps_total": float(sum(r.steps_total for r in results)),
        "drafter/buffer_tokens": float(sum(r.buffer_tokens for r in results)),
        "drafter/buffer_sequences": float(sum(r.buffer_sequences for r in results)),
    }
    if rows:
        metrics["drafter/loss"] = sum(r.loss * r.rows for r in results) / rows
        metrics["drafter/overlap"] = sum(r.overlap * r.rows for r in results) / rows
        metrics["drafter/acc_top1"] = sum(r.top1 * r.rows for r in results) / rows
    trial = of_average
    if trial is None:
        trial = reduce(Comparison.plus, [r.trial for r in results if r.trial is not None], Comparison())
    if trial.starts:
        metrics["drafter/heldout_accept_length"] = trial.candidate_length
        metrics["drafter/heldout_accept_length_before"] = trial.used_length
        metrics["drafter/heldout_tokens"] = trial.starts
        if trial.groups > 1:
            metrics["drafter/heldout_error"] = trial.error
    return metrics


def bubble_metrics(phases: Sequence[PhaseReport]) -> dict[str, float]:
    """`idle/*` of a step: its rollout phases, several with dynamic sampling, and waiting for rewards."""
    parts = [bubble(p) for p in phases]
    worker_s = sum(s.end_s - s.start_s for p in phases for s in p.spans)
    names = dict.fromkeys(name for part in parts for name in part)
    totals = {name: sum(part.get(name, 0.0) for part in parts) for name in names}
    if "idle/preempt_ms_p95" in totals:
        totals["idle/preempt_ms_p95"] = max(part.get("idle/preempt_ms_p95", 0.0) for part in parts)
    if "idle/harvested_ratio" in totals:
        used_s = (part["idle/long_idle_s"] * part.get("idle/harvested_ratio", 0.0) for part in parts)
        totals["idle/harvested_ratio"] = sum(used_s) / totals["idle/long_idle_s"]
    return totals | {"idle/idle_ratio": totals["idle/idle_s"] / max(worker_s, 1e-9)}


def origin_of(first: Path, *, run: str, steps: int) -> dict[str, Any]:
    """Content of `drafter.json` for a drafter that was trained in idle time: its run, and the first drafter's file.

    The first drafter's measurements do not hold for the trained one, so they stay under `first`.  Raises StoreError.
    """
    told = first / "drafter.json"
    remedy = "remove it: only the first drafter's origin is lost"
    known = read_json(told, remedy=remedy) if told.is_file() else {}
    return {"run": run, "steps": steps, "first": known.get("first", known)}


def trains_drafter(cfg: RunConfig) -> bool:
    speculation = cfg.rollout.speculation
    has_one = speculation.policy != "off" and speculation.drafter_path is not None
    return cfg.drafter.idle_training.enabled and has_one and bool(learned_in(strategies_of(speculation)))


class DrafterPublisher:
    def __init__(self, cfg: RunConfig, group: WorkerGroup, *, metrics: StepMetrics, reporter: Reporter) -> None:
        self._cfg, self._idle_training = cfg, cfg.drafter.idle_training
        self._group, self._metrics, self._reporter = group, metrics, reporter
        self._version = self._policy_version = 0  # of the drafter in use, and of the policy that it has learnt from
        self._results: list[IdleTrainingResult] = []  # what the workers have trained in the latest rollout phase

    @property
    def idle_training_settings(self) -> IdleTrainingSettings:
        return IdleTrainingSettings(
            enabled=trains_drafter(self._cfg),
            stream_first=self._cfg.update.streamed != "last",
            min_idle_s=self._idle_training.min_idle_s,
            max_steps=self._idle_training.max_steps,
            interval=self._idle_training.interval,
        )

    @property
    def is_trained(self) -> bool:
        """Have workers trained a drafter in this step?"""
        return bool(self._results)

    def observe(self, results: list[IdleTrainingResult]) -> None:
        """The workers have trained, in a rollout or while rewards were outstanding.  results: by worker."""
        self._results = results

    def publish(self, step: int) -> str:
        """Publish what the workers have trained; returns what was decided, and why."""
        results, self._results = self._results, []
        if not results:
            return "no drafter is trained"
        self._reporter.phase("publish the drafter")
        with self._metrics.timed("publish_drafter"):
            decision = decide(results, errors=self._idle_training.canary_errors)
            published = self._carry_out(decision, step)
        refused = decision.refused or any(not p.accepted for p in published)
        verified = published[0].trial if published else None
        reason = _why_refused(verified) if refused and verified is not None else decision.reason
        log.log(logging.INFO if refused else logging.DEBUG, "drafter: %s", reason)
        self._metrics.log(_training_metrics(results, verified))
        lag = step - 1 - self._policy_version
        self._metrics.log(
            {"drafter/version": self._version, "drafter/policy_version_lag": lag, "drafter/rejected": refused}
        )
        return reason

    def export(self, out_dir: Path, *, steps: int) -> Path | None:
        """The drafter in use as a folder that vLLM and SGLang load; None where none is trained.

        `drafter.json` in it says which drafter it began as.  steps: RL steps that it was trained in.
        """
        first = self._cfg.rollout.speculation.drafter_path
        if not trains_drafter(self._cfg) or first is None:
            return None
        origin = origin_of(Path(first), run=self._cfg.name, steps=steps)
        self._group.export_drafter(out_dir.resolve())
        write_atomically(out_dir / "drafter.json", lambda partial: partial.write_text(json.dumps(origin, indent=1)))
        return out_dir

    def state(self) -> dict[str, Any]:
        return {"drafter_version": self._version, "drafter_policy_version": self._policy_version}

    def restore(self, state: DriverState) -> None:
        self._version, self._policy_version = state.drafter_version, state.drafter_policy_version

    def _carry_out(self, decision: Decision, step: int) -> list[DrafterPublished]:
        """Returns what each worker made of the candidate; empty when none was published."""
        if not any(decision.shares):
            if decision.refused:
                self._group.refuse_drafter()
            return []
        version = self._version + 1
        published = self._group.publish_drafter(decision.shares, measured=decision.measured)
        if len(set(published)) > 1:
            raise RuntimeError(f"workers disagree about drafter {version} ({published}): stop and report this")
        if published[0].accepted:
            self._version = version
            self._policy_version = step - 1  # this step's rollouts are of the policy that the last step has published
            if keep := self._idle_training.keep_published:
                folder = published_dir(self._cfg.run_dir, step)
                self._group.export_drafter(folder.resolve())
                for old in sorted(folder.parent.iterdir())[:-keep]:
                    shutil.rmtree(old)
        return published
