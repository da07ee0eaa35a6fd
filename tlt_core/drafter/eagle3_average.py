"""What several workers learnt apart becomes one drafter: the weighted average of their trainers' states.

Workers train from a common start, each on its own data and for as long as it happens to be idle (local SGD; no
collective that a worker could leave).  Published is the average, weighted by the rows that each one trained.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def weighted_average(states: Sequence[Mapping[str, Tensor]], weights: Sequence[float]) -> dict[str, Tensor]:
    """What several workers have learnt apart, from a common start, as one `Eagle3Trainer.state_dict`.

    Parameters and moments are averaged with these weights (rows that each one trained), in float64; counts of steps
    are the largest; accumulated gradients are left out: each belongs to its own worker's parameters.  Workers of
    weight 0 do not count.  Raises ValueError when none has weight, or when they are not states of one model.
    """
    kept = [(state, weight) for state, weight in zip(states, weights, strict=True) if weight > 0]
    if not kept:
        raise ValueError(f"none of {len(states)} states has a positive weight: nothing was trained")
    total = sum(weight for _, weight in kept)
    names = [[name for name in state if not name.startswith("grad.")] for state, _ in kept]
    if any(sorted(other) != sorted(names[0]) for other in names):
        raise ValueError("the states do not hold the same tensors: average states that were all trained")
    averaged = {}
    for name in names[0]:
        values = [state[name] for state, _ in kept]
        if name == "rows":
            averaged[name] = torch.zeros_like(values[0])
        elif name == "steps" or name.startswith("step."):
            averaged[name] = torch.stack(values).amax(0)
        elif name == "tap_scales" or not values[0].is_floating_point():
            if any(not torch.equal(value, values[0]) for value in values):
                raise ValueError(f"the states differ in {name}: they are not states of one model")
            averaged[name] = values[0].clone()
        else:
            sums = torch.zeros_like(values[0], dtype=torch.float64)
            for value, (_, weight) in zip(values, kept, strict=True):
                sums.add_(value, alpha=weight / total)
            averaged[name] = sums.to(values[0].dtype)
    return averaged
