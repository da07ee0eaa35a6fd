"""`tlt bench memory`: the memory plan of a run, and what its workers took.  It is trained first where there is none."""

from pathlib import Path
from typing import Any

from bench.report import write_report
from bench.verdicts import summarise, verdict
from conf.run import RunConfig
from flows.train import train
from tlt_core.machine import precision
from tlt_core.model.load import load_config
from tlt_core.run import inputs
from tlt_core.run.memory_plan import memory_plan
from tlt_core.run.prompts import Prompts
from tlt_core.run.summary import rows_of

_MEASURED = "perf/max_memory_gb"
_ALLOWED = 0.1


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
