"""Weight gradients of a pass that applies the same layers several times, made in one product at its end.

The training-time test applies every layer once per depth.  Autograd would make a gradient of the weight's size for each
use and add them up.  These passes over memory take time, and slow workers on the same CPU that still decode.  With
inputs x_k and outputs y_k of use k of y = x W^T:

    dL/dW = sum_k (dL/dy_k)^T x_k = cat_k(dL/dy_k)^T cat_k(x_k)

Products are in autocast's dtype, as `F.linear`'s are; each weight is cast once a pass.
"""

from types import TracebackType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class _Uses(NamedTuple):
    """Of one weight in one pass."""

    cast: Tensor  # the weight in the products' dtype
    inputs: list[Tensor]
    gradients: list[Tensor]  # of the outputs; in backward's order, as `inputs` are


class LateGradients:
    """While entered, the linear layers of a model leave their weights' gradients to `add`.

    with LateGradients(model) as late:  loss(model).backward();  late.add()

    Other uses of the weights (a slice of one) get their gradients from autograd, and both add up.  One pass at a time.
    Raises ValueError on a layer with a bias.
    """

    def __init__(self, model: nn.Module) -> None:
        self._linears = [m for m in model.modules() if isinstance(m, nn.Linear) and m.weight.requires_grad]
        if any(linear.bias is not None for linear in self._linears):
            raise ValueError("a layer has a bias, whose gradient would be left out")
        self._uses: dict[Tensor, _Uses] = {}

    def __enter__(self) -> "LateGradients":
        for linear in self._linears:  # of these objects alone: the network's code need not know how it is trained
            linear.forward = _Late(linear.weight, self._uses)  # type: ignore[assignment, method-assign]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for linear in self._linears:
            del linear.forward  # the class's own again
        self._forget()

    @torch.no_grad()
    def add(self) -> None:
        """Add the gradients of all uses so far to the weights' .grad."""
        for weight, uses in self._uses.items():
            if uses.inputs:
                gradient = torch.cat(uses.gradients).T @ torch.cat(uses.inputs)
                weight.grad = gradient.to(weight.dtype) if weight.grad is None else weight.grad.add_(gradient)
        self._forget()

    def _forget(self) -> None:
        for uses in self._uses.values():  # the graph holds them, so they must not keep anything for its sake
            uses.inputs.clear()
            uses.gradients.clear()
        self._uses.clear()


class _Late:
    """`forward` of one layer."""

    def __init__(self, weight: Tensor, uses: dict[Tensor, _Uses]) -> None:
        self._weight, self._uses = weight, uses

    def __call__(self, x_TI: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return F.linear(x_TI, self._weight)
        device = x_TI.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else self._weight.dtype
        if self._weight not in self._uses:
            self._uses[self._weight] = _Uses(self._weight.detach().to(dtype), [], [])
        result: Tensor = _LateLinear.apply(x_TI.to(dtype), self._weight, self._uses[self._weight])
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
