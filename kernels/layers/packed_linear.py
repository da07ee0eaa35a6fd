"""A linear map whose weight is re-arranged once for decoding on a CPU: few tokens, the weight read once.

    y = x W^T + b, summed over the inputs in float32 in one order, rounded to bfloat16 once

`Panels` is the arrangement of `native/linear.c`.  A token's result does not depend on the other tokens of the call, bit
for bit, which no library guarantees.

Shapes: T tokens (any leading axes), inputs and outputs of the map.
"""

from __future__ import annotations

import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import native

_PANEL = 32  # outputs


class Panels:
    """A packed bfloat16 weight [out, in] with its bias.  New values go to the same memory."""

    def __init__(self, weight: Tensor) -> None:
        """Raises ValueError where `can_pack_panels` is false."""
        library = native.library()
        if library is None or not can_pack_panels(weight):
            raise ValueError(f"a weight of shape {tuple(weight.shape)} cannot be packed here: see can_pack_panels")
        self._library, self.shape = library, weight.shape
        rows, columns = weight.shape
        self._panels = torch.empty(-(-rows // _PANEL) * _PANEL * columns, dtype=torch.bfloat16)
        self._bias: Tensor | None = None
        self.struct = native.CLinear(self._panels.data_ptr(), None, rows, columns)
        self._address = ctypes.addressof(self.struct)
        self.set_weight(weight)

    def set_weight(self, weight: Tensor) -> None:
        plain = weight.detach().to("cpu", torch.bfloat16).contiguous()
        self._library.tlt_pack(plain.data_ptr(), *self.shape, self._panels.data_ptr())

    def set_bias(self, bias: Tensor) -> None:
        """New values, [out], any floating dtype."""
        if self._bias is None:
            self._bias = torch.empty(self.shape[0], dtype=torch.bfloat16)
            self.struct.bias = self._bias.data_ptr()
        self._bias.copy_(bias.detach())

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] bfloat16 -> [..., out] bfloat16.  Raises ValueError on another width or type."""
        if x.shape[-1] != self.shape[1] or x.dtype != torch.bfloat16:
            raise ValueError(f"packed weight {tuple(self.shape)}: input {tuple(x.shape)} of {x.dtype} does not fit")
        x = x.contiguous()
        y = x.new_empty(*x.shape[:-1], self.shape[0])
        self._library.tlt_linear(x.data_ptr(), x.numel() // self.shape[1], self._address, y.data_ptr())
        return y


def can_pack_panels(weight: Tensor) -> bool:
    """Whether `Panels` applies: a CPU weight with an even number of inputs, and kernels that run here."""
    return weight.device.type == "cpu" and weight.shape[1] % 2 == 0 and native.library() is not None


def packed_linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The specification, except for the order of summation."""
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)
