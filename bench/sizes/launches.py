"""Launches: how many a plain round makes on a GPU, and the least that one takes.  Zero on a CPU."""

import statistics

import torch
from torch.profiler import ProfilerActivity, profile

from bench.kernels.ops import Clock
from tlt_core.items.types import SamplingParams
from tlt_core.rollout.engine import RolloutEngine
from tlt_core.rollout.graphs import GraphKey, GraphPool, Sampling

_MANY = 1000  # in one graph


def smallest_s(device: torch.device) -> float:
    """Seconds of a kernel of one element, among many that wait for each other in a replayed graph."""
    if device.type != "cuda":
        return 0.0
    x = torch.zeros(1, device=device)
    x.add_(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_MANY):
            x.add_(1)
    return statistics.median(Clock(device).seconds(graph.replay) for _ in range(3)) / _MANY


def of_plain_round(engine: RolloutEngine, params: SamplingParams) -> int:
    """Kernels that the graph of a plain round of one request launches.  0: nothing is captured, or the driver lets
    nobody count.  The engine is prepared, and no request is live."""
    if not isinstance(engine.graphs, GraphPool):
        return 0
    key = GraphKey("plain", 1, 1, Sampling.of(params))
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        engine.graphs.run(key)
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in found.events() or ())
