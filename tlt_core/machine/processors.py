"""How many processors there are, and whether they are enough."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # benchmarks on a bare machine have no pydantic
    from conf.system import ClusterConfig

_PER_PROCESSOR = 4  # workers; more are slower than fewer, and each takes memory for a copy of the policy
_ALWAYS = 16  # workers that any machine may be asked for: a small cluster is tried out on a laptop


class TooManyWorkers(ValueError):
    """More workers than this machine could run.  The text says how many, the limit, and the remedy."""


def usable_processors() -> int:
    """Of this process; other jobs may have the rest."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_workers(cluster: ClusterConfig, *, setting: str = "cluster.num_workers") -> None:
    """Raises TooManyWorkers when a machine of its own is asked for far more worker processes than it has processors.
    setting: what the user has set."""
    found = usable_processors()
    most = max(_ALWAYS, _PER_PROCESSOR * found)
    if cluster.address == "local" and cluster.num_workers > most:
        raise TooManyWorkers(
            f"{setting}={cluster.num_workers}: this machine has {found} processors, which is room for {most} worker "
            f"processes at most; lower {setting} (one worker for each processor or GPU is usual)"
        )
