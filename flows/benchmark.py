"""`tlt bench`: measurements that a script can judge.

    reports/NAME.json: name, commit, command, machine, repeats,
                       rows      one per configuration: median, min and max of each figure
                       verdicts  claim, value, spread, bound, holds

A verdict compares the median with its bound; one that does not hold is reported as such.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from conf.schema import RunConfig
from flows.train import train
from tlt_core import doctor, provenance
from tlt_core.store import write_atomically
from tlt_core.verdicts import summarise, verdict

_PHASES = ("gen", "reward", "update_actor", "update_weights", "save_checkpoint", "tracking", "overhead")


class Bound(NamedTuple):
    """A claim about one figure."""

    claim: str
    figure: str
    bound: float
    at_least: bool  # else: at most


_STEP_CLAIMS = (
    Bound("rollout is at least 70 % of a step", "perf/rollout_share", 0.70, at_least=True),
    Bound("response length p99 is at least 4 times p50", "rollout/tail_ratio", 4.0, at_least=True),
    Bound("Prefect, Ray and MLflow take less than 3 % of a step", "perf/overhead_share", 0.03, at_least=False),
)


def bench_step(cfg: RunConfig, *, repeats: int, out: Path, command: str) -> dict[str, Any]:
    """Run `repeats` training steps after a first one that warms caches up, and report their phases.

    Checkpoints are written as configured; validation is left out: it is not part of most steps.
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
    names += ["timing_s/step", "perf/rollout_tokens_per_s", "bubble/idle_ratio", *(c.figure for c in _STEP_CLAIMS)]
    row = {"configuration": cfg.name, **summarise(steps, names)}
    return write_report(out, command=command, repeats=repeats, rows=[row], verdicts=judge(steps, _STEP_CLAIMS))


def judge(measured: Sequence[Mapping[str, float]], claims: Sequence[Bound]) -> list[dict[str, Any]]:
    """One verdict per claim."""
    verdicts = []
    for claim, figure, bound, at_least in claims:
        values = [m[figure] for m in measured]
        judged = verdict(claim, values, bound)
        holds = judged["holds"] if at_least else judged["value"] < bound
        verdicts.append(judged | {"holds": holds})
    return verdicts


def write_report(
    path: Path,
    *,
    command: str,
    repeats: int,
    rows: Sequence[Mapping[str, Any]],
    verdicts: Sequence[Mapping[str, Any]],
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Write a report atomically, and return it.  environment: variables that change what was measured."""
    report = {
        "name": path.stem,
        "commit": provenance.commit(),
        "command": command,
        "machine": doctor.machine(),
        "repeats": repeats,
        **({} if environment is None else {"environment": dict(environment)}),
        "rows": list(rows),
        "verdicts": list(verdicts),
    }
    write_atomically(path, lambda partial: partial.write_text(json.dumps(report, indent=1) + "\n"))
    return report
