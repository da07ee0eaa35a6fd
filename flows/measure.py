"""Flow: one of the benchmarks, for deployments.  On the command line it is `tlt bench`."""

import pkgutil
from pathlib import Path
from typing import Any

from prefect import flow

from conf.run import RunConfig
from flows._benchmarks import Benchmark, find
from flows._config import as_config
from tlt_core.machine import precision
from tlt_core.run import preflight


@flow(name="benchmark")
def measure(
    config: RunConfig | str,
    benchmark: Benchmark = "step",
    repeats: int = 3,
    overrides: list[str] | None = None,
) -> dict[str, Any]:
    """Measure, judge and write `reports/BENCHMARK.json`; returns the report."""
    bench = pkgutil.resolve_name(find(benchmark))
    cfg = as_config(config, overrides)
    preflight.check_run(cfg)
    cfg = precision.settle(cfg)
    command = f"prefect deployment run benchmark/benchmark -p benchmark={benchmark} -p repeats={repeats}"
    report: dict[str, Any] = bench(cfg, repeats=repeats, out=Path("reports") / f"{benchmark}.json", command=command)
    return report
