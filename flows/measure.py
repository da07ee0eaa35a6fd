"""Flow: one of the benchmarks, as a deployment runs it (on the command line: `tlt bench`)."""

from pathlib import Path
from typing import Any, Literal

from prefect import flow

from conf.schema import RunConfig
from flows._config import as_config
from flows.benchmark import bench_step
from flows.benchmark_rollout import bench_rollout


@flow(name="benchmark")
def measure(
    config: RunConfig | str,
    benchmark: Literal["step", "rollout"] = "step",
    repeats: int = 3,
    overrides: list[str] | None = None,
) -> dict[str, Any]:
    """Measure, judge, write `reports/BENCHMARK.json`; returns the report."""
    cfg = as_config(config, overrides)
    bench = bench_step if benchmark == "step" else bench_rollout
    command = f"prefect deployment run benchmark/benchmark -p benchmark={benchmark} -p repeats={repeats}"
    return bench(cfg, repeats=repeats, out=Path("reports") / f"{benchmark}.json", command=command)
