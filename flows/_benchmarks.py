"""The benchmarks by name: what `tlt bench` and the deployment `benchmark` offer.

They are named, not imported: the package `bench` may be deleted.
"""

import importlib.util
from typing import Literal

from conf.load import ConfigError

Benchmark = Literal[
    "step",
    "e2e",
    "rollout",
    "tuner",
    "idle",
    "engines",
    "peers",
    "demo",
    "memory",
]

BENCHMARKS: dict[Benchmark, str] = {
    "step": "bench.one_run:bench_step",
    "e2e": "bench.e2e:bench_e2e",
    "rollout": "bench.rollout:bench_rollout",
    "tuner": "bench.tuner.command:bench_tuner",
    "idle": "bench.idle.command:bench_idle",
    "engines": "bench.engines.command:bench_engines",
    "peers": "bench.peers.command:bench_peers",
    "demo": "bench.one_run:bench_demo",
    "memory": "bench.one_run:bench_memory",
}


def find(benchmark: Benchmark) -> str:
    """The flow's `module:function`.  Raises ConfigError where the package `bench` is missing."""
    if importlib.util.find_spec("bench") is None:
        raise ConfigError(
            f"benchmark {benchmark}: the package bench is missing; take the folder bench/ from the repository"
        )
    return BENCHMARKS[benchmark]
