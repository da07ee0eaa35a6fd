"""All layers of a packed decoder in a few calls of C (`kernels/native/layers.c`) instead of hundreds of torch calls.

    residual stream, rotary table, PlacedAttend -> layers up to a tap -> a copy -> layers up to the next -> ... -> norm

A token's result is the same, bit for bit, in every pass: alone, in a batch, or as a draft token in a tree.  So
speculation reproduces plain decoding exactly in bfloat16, too.

Shapes: T tokens, D hidden size, E tapped width, Y layers.
"""

import ctypes
import logging
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from kernels import native
from kernels.layers.packed_linear import Panels
from tlt_core.model.decoder import Decoder, Hidden, Layer, PlacedAttend, RmsNorm, Rope

log = logging.getLogger(__name__)

HEAD_DIMS = (64, 128)


class NativeLayers:
    """Replaces a decoder's layers, see `Decoder.forward`.  Reads the weights where the packed decoder keeps them."""

    def __init__(self, decoder: Decoder, library: ctypes.CDLL) -> None:
        config = decoder.config
        self._decoder, self._library = decoder, library
        self._shape = native.CShape(
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.intermediate_size,
            config.rms_norm_eps,
        )
        self._layers = (native.CLayer * config.num_layers)(*(_c_layer(layer) for layer in decoder.layers))
        self._caches: tuple[tuple[int, ...], ctypes.Array[Any]] | None = None

    @classmethod
    def of(cls, decoder: Decoder) -> "NativeLayers | None":
        """None where the kernels do not run or do not support the head size."""
        library = native.library()
        if library is None:
            return None
        if decoder.config.head_dim not in HEAD_DIMS:
            log.info("heads of %d: layers run on torch's kernels, products in C", decoder.config.head_dim)
            return None
        linears = [m for layer in decoder.layers for m in layer.children() if not isinstance(m, RmsNorm | nn.Identity)]
        if any(getattr(linear, "panels", None) is None for linear in linears):
            return None
        return cls(decoder, library)

    def __call__(self, x_TD: Tensor, rope: Rope, attend: PlacedAttend, taps: Sequence[int]) -> Hidden:
        """x_TD: the residual stream that enters the first layer; overwritten.  taps: as in `Decoder.forward`."""
        layout, count = attend.layout, len(self._layers)
        caches = self._c_caches(attend)
        arrays = [x.contiguous() for x in layout]
        slots_T, _, places_T, known_T, paths_TA, lengths_T = (x.data_ptr() for x in arrays)
        where = native.CLayout(len(x_TD), slots_T, places_T, known_T, paths_TA, lengths_T, layout.paths_TA.shape[1])
        cos, signed_sin = (x.contiguous() for x in rope)
        tapped: dict[int, Tensor] = {}
        done = 0
        for stop in sorted({*taps, count}):
            if stop > done:
                self._library.tlt_layers(
                    ctypes.addressof(self._shape),
                    ctypes.addressof(self._layers[done]),
                    ctypes.addressof(caches[done]),
                    stop - done,
                    ctypes.addressof(where),
                    cos.data_ptr(),
                    signed_sin.data_ptr(),
                    x_TD.data_ptr(),
                )
                done = stop
            if stop in taps:
                tapped[stop] = x_TD.clone() if stop < count else x_TD
        last_TD = torch.empty_like(x_TD)
        norm = self._decoder.norm
        self._library.tlt_rms_norm(x_TD.data_ptr(), norm.weight.data_ptr(), *x_TD.shape, norm.eps, last_TD.data_ptr())
        return Hidden(last_TD, torch.cat([tapped[k] for k in taps], dim=-1) if taps else None)

    def _c_caches(self, attend: PlacedAttend) -> "ctypes.Array[Any]":
        keys, values = attend.keys_YSKCd, attend.values_YSKCd
        assert keys.stride() == values.stride(), "keys and values have the same layout"
        assert keys.dtype == values.dtype == torch.bfloat16, "the cache has the dtype of the weights"
        assert int(attend.layout.places_T.max()) < keys.shape[3], "a token lies beyond its slot"
        assert keys.stride(4) == 1, "the features of a head are contiguous"
        assert keys.stride(3) == keys.shape[4], "the places of a head are contiguous"
        known = (keys.data_ptr(), values.data_ptr(), *keys.stride())
        if self._caches is None or self._caches[0] != known:
            entries = [
                native.CCache(k.data_ptr(), v.data_ptr(), k.stride(0), k.stride(1))
                for k, v in zip(keys, values, strict=True)
            ]
            self._caches = known, (native.CCache * len(entries))(*entries)
        return self._caches[1]


def _c_layer(layer: nn.Module) -> ctypes.Structure:
    assert isinstance(layer, Layer), "a decoder's layers are Layers"
    linears = [panels_of(x).struct for x in (layer.qkv_proj, layer.o_proj, layer.gate_up_proj, layer.down_proj)]
    norms = [
        norm.weight.data_ptr() if isinstance(norm, RmsNorm) else None
        for norm in (layer.input_norm, layer.post_norm, layer.q_norm, layer.k_norm)
    ]
    return native.CLayer(*linears, *norms)


def panels_of(linear: nn.Module) -> Panels:
    return cast(Panels, linear.panels)
