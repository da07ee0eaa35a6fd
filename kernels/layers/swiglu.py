"""Gated activation silu(gate) * up on the fused gate-up projection, with a backward that keeps only the input.

    y = s(a) b,  s(a) = a / (1 + exp(-a))             da = g b s'(a),  db = g s(a)

With plain operations autograd would also keep silu(gate), a third of a layer's activations.  Values equal those of
`F.silu(gate) * up` to the bit.  In bfloat16 on a CPU C computes both, in float32 and rounded once, as decoding does.

Shapes: T tokens, I intermediate size.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.dispatch import training_library


def swiglu(gate_up: Tensor) -> Tensor:
    """silu of the first half of the last axis times the second half."""
    if torch.is_grad_enabled() and gate_up.requires_grad:
        y: Tensor = _Swiglu.apply(gate_up)
        return y
    return _value(gate_up)


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return _value(gate_up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        result = torch.empty_like(gate_up, memory_format=torch.contiguous_format)
        library = training_library(gate_up, op="swiglu")
        if library is not None:
            x, grad = gate_up.contiguous(), grads[0].contiguous()
            size = grad.shape[-1]
            library.tlt_swiglu_gradient(x.data_ptr(), grad.data_ptr(), grad.numel() // size, size, result.data_ptr())
            return result
        gate, up = gate_up.chunk(2, dim=-1)
        grad_gate, grad_up = result.chunk(2, dim=-1)
        work = grads[0] * up
        torch.ops.aten.silu_backward.grad_input(work, gate, grad_input=grad_gate)
        torch.mul(F.silu(gate), grads[0], out=grad_up)
        return result


def _value(gate_up: Tensor) -> Tensor:
    library = training_library(gate_up, op="swiglu")
    if library is not None:
        size = gate_up.shape[-1] // 2
        x, y = gate_up.contiguous(), gate_up.new_empty(*gate_up.shape[:-1], size)
        library.tlt_swiglu(x.data_ptr(), x.numel() // (2 * size), size, y.data_ptr())
        return y
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
