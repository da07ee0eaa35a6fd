"""`tlt bench plan`: what `tlt plan` predicts of steps that it was not fitted to, beside what `tlt bench e2e` measured.

Costs, and rates of plain decoding, come from the tail workload's plain run; rates with speculation from its run of the
same variant.  So the workload without a tail, and every streamed update, are predicted.
"""

from pathlib import Path
from typing import Any

from bench.e2e import without_tail
from bench.report import write_report
from bench.runs import variants
from bench.verdicts import verdict
from conf.load import ConfigError
from conf.run import RunConfig
from tlt_core.grpo.passes import skips_zero_advantage
from tlt_core.run.plan.fit import Recorded, recorded
from tlt_core.run.plan.simulate import simulate
from tlt_core.run.summary import rows_of

_VARIANTS = ("plain", "fixed", "static", "streamed", "tlt")  # drafters of `trained` change from step to step
_STREAMS = ("streamed", "tlt")
_ALLOWED = 0.1


def bench_plan(cfg: RunConfig, *, repeats: int, out: Path, command: str) -> dict[str, Any]:
    """Write the report, from runs that `tlt bench e2e` of the same configuration has left.  repeats: not used."""
    tail, no_tail = _runs(cfg), _runs(without_tail(cfg))
    costs = tail["plain"].costs
    rows, off = [], []
    for workload, runs in (("tail", tail), ("no-tail", no_tail)):
        for name, run in runs.items():
            rates = tail["plain" if name == "streamed" else name].rates
            size: dict[str, Any] = {
                "workers": cfg.cluster.num_workers,
                "max_live": cfg.rollout.max_live_requests,
                "streams": name in _STREAMS,
            }
            steps = [simulate(groups, rates, costs, **size) for groups in run.groups]
            planned_s = sum(step.step_s for step in steps) / len(steps)
            error = planned_s / run.step_s - 1
            is_fitted = workload == "tail" and name not in _STREAMS
            rows.append(
                {"workload": workload, "configuration": name, "measured s": run.step_s, "planned s": planned_s}
                | {"error": error, "fitted to it": float(is_fitted)}
            )
            if not is_fitted:
                off.append(abs(error))
    claim = "planned over measured seconds of a step: largest error of those not fitted to"
    return write_report(
        out, command=command, repeats=1, rows=rows, verdicts=[verdict(claim, [max(off)], _ALLOWED, at_most=True)]
    )


def _runs(cfg: RunConfig) -> dict[str, Recorded]:
    runs = variants(cfg, Path("drafter"))  # only the folders' names are needed
    missing = [name for name in _VARIANTS if not (runs[name].run_dir / "metrics.jsonl").is_file()]
    if missing:
        raise ConfigError(
            f"{runs[missing[0]].run_dir} has no recorded steps; run 'tlt bench e2e' with this configuration"
        )
    skips, workers = skips_zero_advantage(cfg.update, cfg.algorithm), cfg.cluster.num_workers
    return {
        name: recorded(runs[name].run_dir, rows_of(runs[name].run_dir), workers=workers, skips=skips)
        for name in _VARIANTS
    }
