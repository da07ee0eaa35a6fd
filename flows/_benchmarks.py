"""The benchmarks by name: what `tlt bench` and the deployment `benchmark` offer."""

from typing import Literal

Benchmark = Literal["step", "e2e", "rollout", "tuner", "spot", "idle", "engines", "kernels", "sizes"]

BENCHMARKS: dict[Benchmark, str] = {
    "step": "flows.benchmark:bench_step",
    "e2e": "flows.benchmark_e2e:bench_e2e",
    "rollout": "flows.benchmark_rollout:bench_rollout",
    "tuner": "flows.benchmark_tuner:bench_tuner",
    "spot": "flows.benchmark_spot:bench_spot",
    "idle": "flows.benchmark_idle:bench_idle",
    "engines": "flows.benchmark_engines:bench_engines",
    "kernels": "flows.benchmark_kernels:bench_kernels_flow",
    "sizes": "flows.benchmark_sizes:bench_sizes_flow",
}
