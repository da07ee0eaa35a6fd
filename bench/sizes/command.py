"""`tlt bench sizes --device cuda --shape qwen2.5-7b`: plain and adaptive decoding at the sizes of real models.

Weights are random and acceptance is simulated, as the report says.  It measures the engine, its graphs and its tuner at
the cost of the real model with a real EAGLE-3 drafter.  On a CPU the shape `tiny` runs the same code.
"""

from pathlib import Path
from typing import Any

from prefect import flow

from bench.kernels import ops as bench_kernels
from bench.report import write_report
from bench.sizes import measure as bench_sizes
from conf.run import RunConfig


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
    """Measure, judge and write the report; returns it.  The configuration is not used.

    shape: one of `planted.SHAPES`; None: qwen2.5-7b on a GPU, tiny elsewhere.
    """
    place = bench_kernels.device_named(device)
    chosen = shape or ("qwen2.5-7b" if place.type == "cuda" else "tiny")
    rows, verdicts = bench_sizes.run(chosen, place, acceptance=planted_acceptance, repeats=repeats)
    return write_report(out, command=command, repeats=repeats, rows=rows, verdicts=verdicts)
