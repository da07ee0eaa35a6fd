"""What the driver itself computes on: the first drafter and trials of drafters need no worker."""

import gc

import torch

from conf.system import ClusterConfig
from tlt_core.machine.memory import give_freed_memory_back


def driver_device(cluster: ClusterConfig) -> str:
    """The workers' kind of device, where this machine has one: a driver may have joined a cluster from elsewhere."""
    return "cuda:0" if cluster.device == "cuda" and torch.cuda.is_available() else "cpu"


def release(device: str) -> None:
    """Give unused memory back: workers start next.  Without it a driver keeps most of what its largest work took."""
    gc.collect()
    give_freed_memory_back()
    if device != "cpu":
        torch.cuda.empty_cache()
