"""`tlt bench step`, `demo` and `memory`: figures of one run.  The last two train it first where there is none."""

import itertools
import json
import math
import re
import shutil
import statistics
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from bench.report import write_report
from bench.verdicts import summarise, verdict
from conf.run import RunConfig
from flows.train import train
from tlt_core.machine import precision, provenance
from tlt_core.model.load import load_config
from tlt_core.run import inputs
from tlt_core.run.memory_plan import memory_plan
from tlt_core.run.prompts import Prompts
from tlt_core.run.savings import savings
from tlt_core.run.summary import rows_of

_PHASES = ("gen", "reward", "update_actor", "update_weights", "save_checkpoint", "tracking", "overhead")
_CLAIMS = (  # figure, claim, bound, at most
    ("perf/rollout_share", "rollout is at least 70 % of a step", 0.70, False),
    ("rollout/tail_ratio", "response length p99 is at least 4 times p50", 4.0, False),
    ("perf/overhead_share", "Prefect, Ray and MLflow take at most 3 % of a step", 0.03, True),
)
_LONGEST_S = 15 * 60
_BANDS = {  # figure of the demo: how far it may be from the report that is replaced, relative, on the same processor
    "total s": 0.3,
    "mean reward": 0.15,
    "acceptance length": 0.15,
}
_QUIET_S = 15.0  # a line at least so often
_STAMP = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}")
_MEASURED = "perf/max_memory_gb"
_ALLOWED = 0.1


def bench_step(cfg: RunConfig, *, repeats: int, out: Path, command: str) -> dict[str, Any]:
    """Phases of `repeats` training steps after one that warms up.  No validation, since most steps have none."""
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


def bench_demo(cfg: RunConfig, *, repeats: int, out: Path, command: str) -> dict[str, Any]:
    """Times of the run's stages, and validation at start and end, beside what `out` says of the same processor.
    repeats: not used, a run is measured once.  Raises ValueError where a figure is missing or not a number."""
    if not any("took_s" in attempt for attempt in provenance.attempts(cfg.run_dir)[-1:]):
        train(cfg)
    attempt, *more = provenance.attempts(cfg.run_dir)
    if more:
        raise ValueError(f"{cfg.run_dir} was resumed, so its time means nothing: remove the folder and run again")
    took = attempt["took_s"]
    total_s = sum(took.values())
    steps = rows_of(cfg.run_dir)
    validations = [s for s in steps if "val-core/all/reward/greedy" in s]
    gaps = _gaps(cfg.run_dir / "log.txt")
    figures = {"total s": total_s} | {f"{stage} s": seconds for stage, seconds in took.items()}
    mean = f"mean_at_{cfg.evaluation.num_samples}"
    for name in ("greedy", mean):
        for when, metrics in (("start", validations[0]), ("end", validations[-1])):
            figures[f"validation {name}, {when}"] = metrics[f"val-core/all/reward/{name}"]
    rows = [s for s in steps if s["step"] > 0]
    for name, metric in (("mean reward", "critic/rewards/mean"), ("acceptance length", "rollout/spec_accept_length")):
        figures[name] = statistics.fmean(row.get(metric, math.nan) for row in rows)
    saved = savings(rows, cfg)
    figures["saved of the time of plain steps"] = saved.saved_s / saved.plain_s
    equal = [row["rollout/plain_equal_frac"] for row in rows if "rollout/plain_equal_frac" in row]
    rise = figures[f"validation {mean}, end"] - figures[f"validation {mean}, start"]
    return write_report(
        out,
        command=command,
        repeats=1,
        rows=[{"configuration": cfg.name, **summarise([figures])}],
        verdicts=[
            verdict("the whole run takes at most 15 minutes, in seconds", [total_s], _LONGEST_S, at_most=True),
            verdict("RL steps", [max(s["step"] for s in steps)], 8),
            verdict("rise of the mean validation reward", [rise], 0.05),
            verdict("longest time without a line, in seconds", [max(gaps)], _QUIET_S, at_most=True),
            verdict("responses with the tokens of plain decoding", [min(equal)], 1.0),
            *changes(json.loads(out.read_text()) if out.is_file() else None, figures, attempt["machine"]["cpu"]),
        ],
        attempt=attempt,
    )


def changes(before: Mapping[str, Any] | None, figures: Mapping[str, float], cpu: str) -> list[dict[str, Any]]:
    """Figures over those of the report before; nothing if there is none, or one of another processor.  Raises
    ValueError where a figure is not a number."""
    wrong = [name for name, value in figures.items() if not math.isfinite(value)]
    if wrong:
        raise ValueError(f"{', '.join(wrong)}: not a number in some step's metrics")
    if before is None or before["machine"]["cpu"] != cpu:
        return []
    (row,), commit = before["rows"], before["commit"][:9]
    known = {name: figures[name] / row[name]["median"] for name in _BANDS.keys() & row.keys()}
    return [
        verdict(f"{name} over that of {commit}: {side}", [ratio], 1 + sign * _BANDS[name], at_most=sign > 0)
        for name, ratio in sorted(known.items())
        for side, sign in (("at least", -1), ("at most", 1))
    ]


def _gaps(log: Path) -> list[float]:
    """Seconds between the lines of a log."""
    stamps = [m.group() for line in log.read_text().splitlines() if (m := _STAMP.match(line))]
    times = [datetime.strptime(stamp, "%Y-%m-%d %H:%M:%S,%f") for stamp in stamps]
    return [(later - earlier).total_seconds() for earlier, later in itertools.pairwise(times)]


def bench_memory(cfg: RunConfig, *, repeats: int, out: Path, command: str) -> dict[str, Any]:
    """Write the report.  repeats: not used, memory does not vary."""
    if not any(_MEASURED in row for row in rows_of(cfg.run_dir)):
        train(cfg)
    settled = precision.settle(cfg)
    start = inputs.start_model(cfg.model, seed=cfg.seed)
    prompts = Prompts.load(inputs.data_dir(cfg), start, num_prompts=cfg.rollout.num_prompts)
    plan = memory_plan(settled, load_config(start), longest_prompt=prompts.longest)
    taken_gb = max(row[_MEASURED] for row in rows_of(cfg.run_dir) if _MEASURED in row)
    phase, planned = plan.peak
    figures = {"planned GB": planned / 1e9, "taken GB": taken_gb, "planned over taken": planned / 1e9 / taken_gb}
    figures |= {f"{name}, GB": size / 1e9 for name, size in plan.phases[phase].items()}
    ratio = [figures["planned over taken"]]
    return write_report(
        out,
        command=command,
        repeats=1,
        rows=[{"configuration": cfg.name, "phase": phase, **summarise([figures])}],
        verdicts=[
            verdict("planned over taken memory: at least", ratio, 1 - _ALLOWED),
            verdict("planned over taken memory: at most", ratio, 1 + _ALLOWED, at_most=True),
        ],
    )
