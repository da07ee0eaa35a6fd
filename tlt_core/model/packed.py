"""Pre-packed weights for rollout replicas on CPU, made once per policy version.

A plain bf16 `F.linear` re-arranges its weight matrix in every call.  The packed form is the panels of
`kernels/layers/packed_linear`, or oneDNN's blocked layout where those do not run.  For inference only (no gradient).
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from kernels.layers.packed_linear import Panels, can_pack_panels
from tlt_core.model.config import ModelError
from tlt_core.model.decoder import Decoder
from tlt_core.model.native_layers import NativeLayers

_HEAD_NAMES = {True: "embed_tokens.weight", False: "lm_head.weight"}  # by tie_word_embeddings


class PackedLinear(nn.Module):
    """x W^T + b with W packed.  It holds no parameter; `PackedWeights` checks names and shapes."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.shape = weight.shape
        self.bias: Tensor | None = None
        self.panels = Panels(weight) if can_pack_panels(weight) else None
        if self.panels is None:
            self.set_weight(weight)
        if bias is not None:
            self.set_bias(bias)

    def set_weight(self, weight: Tensor) -> None:
        if self.panels is not None:
            self.panels.set_weight(weight)
            return
        # Copy first: oneDNN may return the same memory where re-arranging does not pay, and the caller may change it.
        copied = weight.detach().to(torch.bfloat16, copy=True).contiguous()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(copied)

    def set_bias(self, bias: Tensor) -> None:
        self.bias = bias.detach().to(torch.bfloat16, copy=True)
        if self.panels is not None:
            self.panels.set_bias(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] bfloat16 -> [..., out] bfloat16."""
        if self.panels is not None:
            return self.panels(x)
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")


class PackedWeights:
    """The packed projections of one decoder, by the names of the parameters that they replace."""

    def __init__(self, decoder: Decoder, linears: dict[str, PackedLinear], head: PackedLinear) -> None:
        self._decoder, self._linears, self._head = decoder, linears, head

    def repack(self, weights: Iterable[tuple[str, Tensor]]) -> bool:
        """Overwrite the decoder's weights, as `Decoder.load_weights` does for a plain decoder.  Returns whether packed
        weights have moved: oneDNN's do, panels stay in place.

        Names and shapes are those of the plain decoder, the dtype any floating one.  Raises ModelError on a name or
        shape that does not fit.
        """
        head_name = _HEAD_NAMES[self._decoder.config.tie_word_embeddings]
        for name, value in weights:
            module, _, kind = name.rpartition(".")
            linear = self._linears.get(module)
            if linear is None:
                self._decoder.load_weights([(name, value)])
                if name == head_name:
                    self._head.set_weight(value)
            elif kind == "weight" and value.shape == linear.shape:
                linear.set_weight(value)
            elif kind == "bias" and linear.bias is not None and value.shape == linear.bias.shape:
                linear.set_bias(value)
            else:
                raise ModelError(f"weight {name} of shape {tuple(value.shape)} does not fit this decoder")
        return any(linear.panels is None for linear in (self._head, *self._linears.values()))


def can_pack(decoder: Decoder) -> bool:
    """Whether `pack_linears` applies: bfloat16 weights on a CPU where our kernels or oneDNN's run."""
    weight = decoder.head_weight
    if decoder.config.foreign:
        return False
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
        return False
    linears = [m for layer in decoder.layers for m in layer.children() if isinstance(m, nn.Linear)]
    if hasattr(torch.ops.mkldnn, "_linear_pointwise") and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return True
    return all(can_pack_panels(w) for w in (weight, *(linear.weight for linear in linears)))


def pack_linears(decoder: Decoder) -> PackedWeights:
    """Swap the layers' nn.Linear modules for packed ones, and let `Decoder.logits` use a packed copy of the LM head.

    The plain layer weights are released; embedding and `head_weight` stay as they are.  Raises ValueError where
    `can_pack` is false.
    """
    if not can_pack(decoder):
        weight = decoder.head_weight
        raise ValueError(
            f"weights in {weight.dtype} on {weight.device} cannot be packed: pre-packing needs bfloat16 on a CPU and "
            "our kernels (a C compiler) or oneDNN's; use the plain decoder"
        )
    linears = {}
    for index, layer in enumerate(decoder.layers):
        for name, module in list(layer.named_children()):
            if isinstance(module, nn.Linear):
                packed = PackedLinear(module.weight, module.bias)
                setattr(layer, name, packed)
                linears[f"layers.{index}.{name}"] = packed
    decoder.packed_head = head = PackedLinear(decoder.head_weight, None)
    decoder.packed_layers = NativeLayers.of(decoder)
    return PackedWeights(decoder, linears, head)
