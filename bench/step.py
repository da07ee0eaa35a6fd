"""`tlt bench step`: the phases of a training step."""

import shutil
from pathlib import Path
from typing import Any

from bench.report import write_report
from bench.verdicts import summarise, verdict
from conf.run import RunConfig
from flows.train import train
from tlt_core.run.summary import rows_of

_PHASES = ("gen", "reward", "update_actor", "update_weights", "save_checkpoint", "tracking", "overhead")
_CLAIMS = (  # figure, claim, bound, at most
    ("perf/rollout_share", "rollout is at least 70 % of a step", 0.70, False),
    ("rollout/tail_ratio", "response length p99 is at least 4 times p50", 4.0, False),
    ("perf/overhead_share", "Prefect, Ray and MLflow take at most 3 % of a step", 0.03, True),
)


def bench_step(cfg: RunConfig, *, repeats: int, out: Path, command: str) -> dict[str, Any]:
    """Run `repeats` training steps after a first one that warms up, and report their phases.

    Checkpoints are written as configured.  There is no validation, since most steps have none.
    """
    validation = cfg.evaluation.model_copy(update={"every_steps": 0})
    tracking = cfg.tracking.model_copy(update={"register_models": False})
    changes = {"name": f"bench-{cfg.name}", "num_steps": repeats + 1, "evaluation": validation, "tracking": tracking}
    run = cfg.model_copy(update=changes)
    shutil.rmtree(run.run_dir, ignore_errors=True)  # an earlier benchmark would be resumed
    train(run)
    shutil.rmtree(run.run_dir / "checkpoints")
    steps = [row for row in rows_of(run.run_dir) if row["step"] > 1]
    names = [f"timing_s/{phase}" for phase in _PHASES]
    names += ["timing_s/step", "perf/rollout_tokens_per_s", "idle/idle_ratio", *(figure for figure, *_ in _CLAIMS)]
    row = {"configuration": cfg.name, **summarise(steps, names)}
    verdicts = [
        verdict(claim, [step[figure] for step in steps], bound, at_most=at_most)
        for figure, claim, bound, at_most in _CLAIMS
    ]
    return write_report(out, command=command, repeats=repeats, rows=[row], verdicts=verdicts)
