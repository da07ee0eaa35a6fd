"""`tlt bench step`: the phases of a training step."""

import json
import shutil
from pathlib import Path
from typing import Any

from bench.report import Bound, judge, write_report
from bench.verdicts import summarise
from conf.run import RunConfig
from flows.train import train

_PHASES = ("gen", "reward", "update_actor", "update_weights", "save_checkpoint", "tracking", "overhead")
_STEP_CLAIMS = (
    Bound("rollout is at least 70 % of a step", "perf/rollout_share", 0.70, at_least=True),
    Bound("response length p99 is at least 4 times p50", "rollout/tail_ratio", 4.0, at_least=True),
    Bound("Prefect, Ray and MLflow take less than 3 % of a step", "perf/overhead_share", 0.03, at_least=False),
)


def bench_step(cfg: RunConfig, *, repeats: int, out: Path, command: str) -> dict[str, Any]:
    """Run `repeats` training steps after a first one that warms up, and report their phases.

    Checkpoints are written as configured.  There is no validation, since most steps have none.
    """
    validation = cfg.evaluation.model_copy(update={"every_steps": 0})
    tracking = cfg.tracking.model_copy(update={"register_models": False})
    run = cfg.model_copy(
        update={
            "name": f"bench-{cfg.name}",
            "num_steps": repeats + 1,
            "evaluation": validation,
            "tracking": tracking,
        }
    )
    shutil.rmtree(run.run_dir, ignore_errors=True)  # an earlier benchmark would be resumed
    train(run)
    shutil.rmtree(run.run_dir / "checkpoints")
    lines = (run.run_dir / "metrics.jsonl").read_text().splitlines()
    steps = [row for row in map(json.loads, lines) if row["step"] > 1]
    names = [f"timing_s/{phase}" for phase in _PHASES]
    names += ["timing_s/step", "perf/rollout_tokens_per_s", "idle/idle_ratio", *(c.figure for c in _STEP_CLAIMS)]
    row = {"configuration": cfg.name, **summarise(steps, names)}
    return write_report(out, command=command, repeats=repeats, rows=[row], verdicts=judge(steps, _STEP_CLAIMS))
