"""Weight gradients of a pass that applies the same layers several times, made in one product at its end.

The training-time test applies every layer once per depth.  Autograd would make a gradient of the weight's size for each
use and add them up.  These passes over memory take time, and slow workers on the same CPU that still decode.  With
inputs x_k and outputs y_k of use k of y = x W^T:

    dL/dW = sum_k (dL/dy_k)^T x_k = cat_k(dL/dy_k)^T cat_k(x_k)

Products are in autocast's dtype, as `F.linear`'s are; each weight is cast once a pass.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class _Uses(NamedTuple):
    """Of one weight in one pass."""

    cast: Tensor  # the weight in the products' dtype
    inputs: list[Tensor]
    gradients: list[Tensor]  # of the outputs; in backward's order, as `inputs` are


@contextmanager
def late_gradients(model: nn.Module) -> Iterator[Callable[[], None]]:
    """While entered, the linear layers of a model, which have no biases, leave their weights' gradients to `add`.

    with late_gradients(model) as add:  loss(model).backward();  add()

    Other uses of the weights (a slice of one) get their gradients from autograd, and both add up.  One pass at a time.
    """
    linears = [m for m in model.modules() if isinstance(m, nn.Linear) and m.weight.requires_grad]
    passes: dict[Tensor, _Uses] = {}
    for linear in linears:  # of these objects alone: the network's code need not know how it is trained
        linear.forward = partial(_late, linear.weight, passes)  # type: ignore[method-assign]
    try:
        yield partial(_add, passes)
    finally:
        for linear in linears:
            del linear.forward  # the class's own again
        _forget(passes)


@torch.no_grad()
def _add(passes: dict[Tensor, _Uses]) -> None:
    """Add the gradients of all uses so far to the weights' .grad."""
    for weight, uses in passes.items():
        if uses.inputs:
            gradient = torch.cat(uses.gradients).T @ torch.cat(uses.inputs)
            weight.grad = gradient.to(weight.dtype) if weight.grad is None else weight.grad.add_(gradient)
    _forget(passes)


def _forget(passes: dict[Tensor, _Uses]) -> None:
    for uses in passes.values():  # the graph holds them, so they must not keep anything for its sake
        uses.inputs.clear()
        uses.gradients.clear()
    passes.clear()


def _late(weight: Tensor, passes: dict[Tensor, _Uses], x_TI: Tensor) -> Tensor:
    """`forward` of one layer."""
    if not torch.is_grad_enabled():
        return F.linear(x_TI, weight)
    device = x_TI.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    if weight not in passes:
        passes[weight] = _Uses(weight.detach().to(dtype), [], [])
    result: Tensor = _LateLinear.apply(x_TI.to(dtype), weight, passes[weight])
    return result


class _LateLinear(torch.autograd.Function):
    """y = x W^T; W is an argument only so that y has a gradient where x has none."""

    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, weight: Tensor, uses: _Uses) -> Tensor:
        ctx.save_for_backward(x_TI)
        ctx.uses = uses
        return F.linear(x_TI, uses.cast)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None]:
        (x_TI,), uses = ctx.saved_tensors, ctx.uses
        uses.inputs.append(x_TI.detach())  # with its history it would hold the graph that holds it, for ever
        uses.gradients.append(grads[0])
        return (grads[0] @ uses.cast if ctx.needs_input_grad[0] else None), None, None
