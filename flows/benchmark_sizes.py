"""`tlt bench sizes --device cuda --shape qwen2.5-7b`: plain beside adaptive decoding at true model sizes.

Random weights and a planted acceptance, said so in the report: what is measured is the engine, its graphs and its
tuner at the cost of the real model and a real EAGLE-3 drafter.  On a CPU the shape `tiny` runs the same code.
"""

from pathlib import Path
from typing import Any

from prefect import flow

from conf.schema import RunConfig
from flows.benchmark import write_report
from tlt_core import bench_kernels, bench_sizes


@flow(name="bench-sizes")
def bench_sizes_flow(
    cfg: RunConfig,
    *,
    repeats: int,
    out: Path,
    command: str,
    device: str = "cpu",
    shape: str | None = None,
    planted_acceptance: float = 4.0,
) -> dict[str, Any]:
    """Measure, judge, write the report; returns it.  Of the configuration nothing is used.  shape: of
    `planted.SHAPES`; by default qwen2.5-7b on a GPU, tiny elsewhere."""
    place = bench_kernels.device_named(device)
    chosen = shape or ("qwen2.5-7b" if place.type == "cuda" else "tiny")
    rows, verdicts = bench_sizes.run(chosen, place, acceptance=planted_acceptance, repeats=repeats)
    return write_report(out, command=command, repeats=repeats, rows=rows, verdicts=verdicts)
