"""A drafter's parameters: copied, averaged, and as one vector, as workers exchange them."""

import copy

import torch
from torch import Tensor

from tlt_core.drafter.eagle3.model import Eagle3Model


def copy_of(model: Eagle3Model) -> Eagle3Model:
    """The same weights in memory of their own, without gradients."""
    return copy.deepcopy(model).requires_grad_(False)


@torch.no_grad()
def flat(model: Eagle3Model) -> Tensor:
    """All parameters as one vector."""
    return torch.cat([p.flatten() for p in model.parameters()])


@torch.no_grad()
def fill(model: Eagle3Model, parameters_N: Tensor) -> None:
    """Copy the vector that `flat` gave into the parameters."""
    sizes = [p.numel() for p in model.parameters()]
    for parameter, values in zip(model.parameters(), parameters_N.split(sizes), strict=True):
        parameter.copy_(values.view_as(parameter))


def checksum(model: Eagle3Model) -> int:
    """Of every bit of the parameters."""
    vectors = [p.detach().flatten() for p in model.parameters()]
    words = [x.view(torch.int32 if len(x) % 2 else torch.int64) for x in vectors]  # pairs take a quarter of the time
    return sum(int(x.sum(dtype=torch.int64)) for x in words)
