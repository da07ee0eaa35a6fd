"""`tlt bench demo`: what a newcomer's first run takes and brings.  The run is trained first where there is none."""

import itertools
import re
from datetime import datetime
from pathlib import Path
from typing import Any

from bench.report import write_report
from bench.verdicts import summarise, verdict
from conf.run import RunConfig
from flows.train import train
from tlt_core.machine import provenance
from tlt_core.run.summary import rows_of

_LONGEST_S = 15 * 60
_QUIET_S = 15.0  # a line at least so often
_STAMP = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}")


def bench_demo(cfg: RunConfig, *, repeats: int, out: Path, command: str) -> dict[str, Any]:
    """Times of the run's stages, and validation at start and end.  repeats: not used, a run is measured once."""
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
        ],
        attempt=attempt,
    )


def _gaps(log: Path) -> list[float]:
    """Seconds between the lines of a log."""
    stamps = [m.group() for line in log.read_text().splitlines() if (m := _STAMP.match(line))]
    times = [datetime.strptime(stamp, "%Y-%m-%d %H:%M:%S,%f") for stamp in stamps]
    return [(later - earlier).total_seconds() for earlier, later in itertools.pairwise(times)]
