"""What the driver itself computes on: the first drafter and trials of drafters need no worker."""

import torch

from conf.system import ClusterConfig


def driver_device(cluster: ClusterConfig) -> str:
    """The workers' kind of device, where this machine has one: a driver may have joined a cluster from elsewhere."""
    return "cuda:0" if cluster.device == "cuda" and torch.cuda.is_available() else "cpu"


def release(device: str) -> None:
    """Give a GPU's unused memory back: workers start next."""
    if device != "cpu":
        torch.cuda.empty_cache()
