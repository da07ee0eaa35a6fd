"""Which drafter the engines draft with: publishes what idle workers have trained, unless it drafts worse.

rollout phase --observe--> DrafterPublisher --publish--> all workers       (the rule: `drafter_release.decide`)
      ^--- idle_training_settings: when idle workers train
"""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

from conf.run import RunConfig
from tlt_core.cluster.drafting import DrafterPublished
from tlt_core.cluster.group import WorkerGroup
from tlt_core.drafter.kinds import learned_in, strategies_of
from tlt_core.idle_training.coordinator import IdleTrainingSettings
from tlt_core.idle_training.training import IdleTrainingResult
from tlt_core.items.checkpoint import DriverState
from tlt_core.items.store import write_atomically
from tlt_core.run.drafter_release import (
    Decision,
    decide,
    idle_training_metrics,
    origin_of,
    published_dir,
    why_refused,
)
from tlt_core.run.progress import Reporter
from tlt_core.run.step_metrics import StepMetrics

log = logging.getLogger(__name__)


def trains_drafter(cfg: RunConfig) -> bool:
    """Do idle workers train a drafter in this run?"""
    speculation = cfg.rollout.speculation
    has_one = speculation.policy != "off" and speculation.drafter_path is not None
    return cfg.drafter.idle_training.enabled and has_one and bool(learned_in(strategies_of(speculation)))


class DrafterPublisher:
    """Owns the drafter's version."""

    def __init__(self, cfg: RunConfig, group: WorkerGroup, *, metrics: StepMetrics, reporter: Reporter) -> None:
        self._cfg, self._idle_training = cfg, cfg.drafter.idle_training
        self._group, self._metrics, self._reporter = group, metrics, reporter
        self._version = self._policy_version = 0  # of the drafter in use, and of the policy that it has learnt from
        self._results: list[IdleTrainingResult] = []  # what the workers have trained in the latest rollout phase

    @property
    def idle_training_settings(self) -> IdleTrainingSettings:
        """What idle workers do."""
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
        """Publish what the workers have trained, unless it drafts worse; returns what was decided, and why."""
        results, self._results = self._results, []
        if not results:
            return "no drafter is trained"
        self._reporter.phase("publish the drafter")
        with self._metrics.timed("publish_drafter"):
            decision = decide(results, errors=self._idle_training.canary_errors)
            published = self._carry_out(decision, step)
        refused = decision.refused or any(not p.accepted for p in published)
        verified = published[0].trial if published and refused else None
        reason = decision.reason if verified is None else why_refused(verified)
        log.log(logging.INFO if refused else logging.DEBUG, "drafter: %s", reason)
        lag = step - 1 - self._policy_version
        self._metrics.log(
            idle_training_metrics(results, decision=decision, published=published, version=self._version, lag=lag)
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
        """Its fields of `DriverState`."""
        return {
            "drafter_version": self._version,
            "drafter_policy_version": self._policy_version,
        }

    def restore(self, state: DriverState) -> None:
        """Go on from a checkpoint."""
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
            self._keep(step)
        return published

    def _keep(self, step: int) -> None:
        keep = self._idle_training.keep_published
        if keep:
            folder = published_dir(self._cfg.run_dir, step)
            self._group.export_drafter(folder.resolve())
            for old in sorted(folder.parent.iterdir())[:-keep]:
                shutil.rmtree(old)
