"""After a failed call: which of the group's processes is gone, and whether the error is one of ours."""

import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from tlt_core.cluster.placement import Node, lost_nodes

_WITHIN_S = 10.0  # for Ray to notice that a process or node is gone, after its peers have felt it


def dead_processes(workers: Sequence[Any], nodes: Sequence[Node], dispatcher: Any) -> list[str]:
    """In words; nodes: of the workers, by rank.  A living process answers, or is busy."""
    asked = {worker.__ray_ready__.remote(): rank for rank, worker in enumerate(workers)}
    asked[dispatcher.__ray_ready__.remote()] = len(workers)
    pending, dead, until_s = list(asked), list[int](), time.monotonic() + _WITHIN_S
    while pending and not dead and (left_s := until_s - time.monotonic()) > 0:
        answered, pending = ray.wait(pending, num_returns=1, timeout=left_s)
        dead = [asked[call] for call in answered if _is_lost(call)]
    lost = lost_nodes(nodes)
    found = [
        f"worker {rank} on node {node.address}{', which has left the cluster' if node.id in lost else ''}"
        for rank, node in enumerate(nodes)
        if rank in dead or node.id in lost
    ]
    return [*found, *(["the dispatcher of requests"] if len(workers) in dead else [])]


def who(dead: Sequence[str]) -> str:
    """The sentence for `dead_processes`."""
    which = "; ".join(dead) or "it is not known which"
    return f"A worker process ended unexpectedly ({which}): it was killed, ran out of memory, or its node failed."


def own_error(error: RayError) -> Exception | None:
    """Our own typed errors keep their type across the process boundary; anything else is a dead worker."""
    cause = error.cause if isinstance(error, RayTaskError) else None
    return cause if isinstance(cause, OSError) or type(cause).__module__.startswith("tlt_core.") else None


def _is_lost(call: Any) -> bool:
    try:
        ray.get(call)
    except RayError:
        return True
    return False
