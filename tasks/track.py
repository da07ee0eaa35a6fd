"""Task: record a step, in files and in MLflow.

runs/NAME/metrics.jsonl            one line a step, always
runs/NAME/figures/*.png            worker timeline, response lengths, reward curve
runs/NAME/samples/step_000003.jsonl
runs/NAME/metrics.prom             the newest step for Prometheus, as a file for node_exporter's textfile collector
MLflow                             the same, when it answers (`mlflow_run.py`)
"""

import json
import logging
import re
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks import figures
from tasks.mlflow_run import MlflowRun
from tlt_core.data import dataset as datasets
from tlt_core.items.store import Ref, write_atomically
from tlt_core.items.types import ScoredBatch
from tlt_core.machine import provenance
from tlt_core.run.savings import savings
from tlt_core.run.session import Session
from tlt_core.run.step_metrics import time_metrics
from tlt_core.run.summary import learning, rows_of

log = logging.getLogger(__name__)


@task(task_run_name="track-{step}", cache_policy=NO_CACHE)
def track(session: Session, tracker: "Tracker", step: int, scored: ScoredBatch) -> dict[str, float]:
    """Figures, samples, metrics and the log line of one step."""
    return tracker.step(session, step, scored)


class Tracker:
    """Context manager around one attempt at a run; its exit reports to MLflow how the attempt ended."""

    def __init__(self, session: Session, *, dataset: Ref) -> None:
        cfg = session.cfg
        self._cfg = cfg
        self._run_dir = cfg.run_dir
        self._rows = _rows_up_to(self._run_dir, session.completed_steps)
        self._attempt = session.resume_attempt
        self._began_s = time.perf_counter()
        earlier = session.tracker_run_id or provenance.tracker_run_id(self._run_dir)

        def on_start(run_id: str) -> None:
            session.tracker_run_id = run_id
            provenance.keep_tracker_run_id(self._run_dir, run_id)

        self.mlflow = MlflowRun(cfg.tracking, run_name=cfg.name, resume_id=earlier, on_start=on_start)
        with ExitStack() as started:
            started.push(self)  # MLflow's run ends when the rest fails
            self._describe(dataset)
            self.mlflow.artifact(self._run_dir / "config.yaml")
            self.mlflow.artifact(self._run_dir / "run.json")
            self._catch_up(session)
            started.pop_all()

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, error_type: type | None, *_: object) -> None:
        interrupted = error_type in (KeyboardInterrupt, SystemExit)
        self.mlflow.end("FINISHED" if error_type is None else "KILLED" if interrupted else "FAILED")

    def begin_step(self) -> None:
        self._began_s = time.perf_counter()

    def record(self, values: Mapping[str, float], *, step: int) -> None:
        """Log the numbers of a step; step 0 has the cold start and the first validation."""
        self._append({"step": step, **values})
        text = prometheus({"step": step, **values}, run=self._cfg.name)
        write_atomically(self._run_dir / "metrics.prom", lambda partial: partial.write_text(text))
        self.mlflow.metrics(values, step=step)

    def outcome(self, values: Mapping[str, float]) -> None:
        """Log numbers of the whole run at its last step, in MLflow alone."""
        self.mlflow.metrics(values, step=self._cfg.num_steps)

    def verdict(self) -> str:
        """What the run has saved, in one line; also MLflow's tag `verdict` and metrics `saved/*`."""
        found = savings(self._rows, self._cfg)
        self.mlflow.tag("verdict", found.verdict)
        self.outcome(found.metrics())
        return found.verdict

    def learning(self) -> str:
        """How the validation reward has changed, in one line; empty with less than two validations."""
        return learning(self._rows, samples=self._cfg.evaluation.num_samples)

    def step(self, session: Session, step: int, scored: ScoredBatch) -> dict[str, float]:
        started_s = time.perf_counter()
        self._write_samples(session, step, scored)
        if step % self._cfg.tracking.figure_every_steps == 0 or step == self._cfg.num_steps:
            self._draw(session, step, scored)
        now_s = time.perf_counter()
        session.metrics.log({"timing_s/tracking": now_s - started_s, "training/resume_attempt": self._attempt})
        values = session.metrics.values()
        values |= time_metrics(values, session.metrics.spans, step_s=now_s - self._began_s)
        self.record(values, step=step)
        log.info("%s", step_line(values, step=step, num_steps=self._cfg.num_steps))
        return values

    def _catch_up(self, session: Session) -> None:
        """Record what a killed attempt has done without recording it, and send earlier rows to MLflow."""
        last = session.completed_steps
        if last > 0 and session.resumed_metrics and all(row["step"] != last for row in self._rows):
            self._append({"step": last, **session.resumed_metrics})
        for row in self._rows:
            self.mlflow.metrics({k: v for k, v in row.items() if k != "step"}, step=row["step"])

    def _describe(self, dataset: Ref) -> None:
        folder = Path(dataset.path)
        generator = datasets.read_manifest(folder).generator
        self.mlflow.describe(
            self._cfg.model_dump(mode="json"),
            tags={"commit": provenance.commit(), "run_dir": str(self._run_dir.absolute())},
            data={
                "kind": self._cfg.data.kind,
                "generator": generator,
                "path": dataset.path,
                "num_train": str(dataset.count),
            },
            digest=dataset.sha256,
        )
        self.mlflow.artifact(folder / "manifest.json", folder="data")

    def _write_samples(self, session: Session, step: int, scored: ScoredBatch) -> None:
        rows = session.scoring.sample_texts(scored, self._cfg.tracking.num_sample_rollouts)
        if not rows:
            return
        path = self._run_dir / "samples" / f"step_{step:06d}.jsonl"
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        write_atomically(path, lambda partial: partial.write_text(text, encoding="utf-8"))
        self.mlflow.artifact(path, folder="samples")

    def _draw(self, session: Session, step: int, scored: ScoredBatch) -> None:
        folder = self._run_dir / "figures"
        timeline, lengths = folder / f"timeline_{step:06d}.png", folder / f"lengths_{step:06d}.png"
        figures.timeline(session.metrics.spans, scored, step=step, path=timeline)
        figures.lengths(
            scored.rollouts.response_lens_R, step=step, max_new_tokens=self._cfg.rollout.max_new_tokens, path=lengths
        )
        drawn = [timeline, lengths]
        if any(session.rollout.rounds):
            drawn.append(folder / f"speculation_{step:06d}.png")
            figures.speculation(session.rollout.rounds, step=step, path=drawn[-1])
        drawn.append(folder / "reward.png")
        figures.reward_curve([*self._rows, {"step": step, **session.metrics.values()}], path=drawn[-1])
        for path in drawn:
            self.mlflow.artifact(path, folder="figures")

    def _append(self, row: dict[str, Any]) -> None:
        self._rows.append(row)
        with (self._run_dir / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")


def prometheus(values: Mapping[str, float], *, run: str) -> str:
    """Prometheus' text format: critic/rewards/mean of run demo becomes `tlt_critic_rewards_mean{run="demo"} 0.5`."""
    return "".join(f'tlt_{re.sub("[^a-zA-Z0-9]", "_", n)}{{run="{run}"}} {value}\n' for n, value in values.items())


def step_line(values: Mapping[str, float], *, step: int, num_steps: int) -> str:
    """The line that each step logs; its columns are fixed."""
    v = defaultdict(float, values)
    return (
        f"step {step:>4}/{num_steps:<4} reward {v['critic/rewards/mean']:6.3f}"
        f"  length p50 {v['response_length/p50']:5.0f} p99 {v['response_length/p99']:5.0f}"
        f"  {v['perf/rollout_tokens_per_s']:6.0f} tok/s  idle {v['idle/idle_ratio']:4.0%}"
        f"  rollout {v['timing_s/gen']:5.1f} update {v['timing_s/update_actor']:5.1f} step {v['timing_s/step']:5.1f} s"
    )


def _rows_up_to(run_dir: Path, completed_steps: int) -> list[dict[str, Any]]:
    """Rows of earlier attempts up to the checkpoint; later ones are removed from the file, as their steps run again."""
    if not (run_dir / "metrics.jsonl").is_file():
        return []
    kept = [row for row in rows_of(run_dir) if row["step"] <= completed_steps and completed_steps > 0]
    text = "".join(json.dumps(row) + "\n" for row in kept)
    write_atomically(run_dir / "metrics.jsonl", lambda partial: partial.write_text(text))
    return kept
