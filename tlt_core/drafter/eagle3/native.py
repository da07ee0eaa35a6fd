"""EAGLE-3's passes in C (`kernels/native/layers.c`).  A level of drafting is so little work that calls of torch's
operations would take as long as the work.

Shapes: T tokens, D hidden size, d head size.
"""

import ctypes
from typing import cast

import torch
from torch import Tensor

from kernels import native
from kernels.tree.draft_children import Children
from kernels.tree.tree_layout import TreeLayout
from tlt_core.drafter.eagle3.model import Eagle3Model
from tlt_core.model.native_layers import HEAD_DIMS, panels_of


class NativeEagle3:
    """Replaces `Eagle3Model.forward`.  Reads the packed model's weights in place."""

    def __init__(self, model: Eagle3Model, library: ctypes.CDLL) -> None:
        layer = model.config.layer
        self._library, self._model = library, model
        self._shape = native.CShape(
            layer.hidden_size,
            layer.num_heads,
            layer.num_kv_heads,
            layer.head_dim,
            layer.intermediate_size,
            layer.rms_norm_eps,
        )
        linears = (model.qkv_proj, model.o_proj, model.gate_up_proj, model.down_proj)
        norms = (model.input_norm.weight.data_ptr(), model.post_norm.weight.data_ptr(), None, None)
        self._layer = native.CLayer(*(panels_of(linear).struct for linear in linears), *norms)

    @classmethod
    def of(cls, model: Eagle3Model) -> "NativeEagle3 | None":
        """None where the kernels do not run, the model is not packed, or the head size is not supported."""
        library = native.library()
        if library is None or model.config.layer.head_dim not in HEAD_DIMS:
            return None
        if getattr(model.qkv_proj, "panels", None) is None:
            return None
        return cls(model, library)

    def __call__(
        self, embeds_TD: Tensor, hidden_TD: Tensor, rope_T21d: Tensor, cache: tuple[Tensor, Tensor], layout: TreeLayout
    ) -> Tensor:
        """As `Eagle3Model.forward`.  cache: keys and values from place 0 on, [S, K, C, d]; negative places exist."""
        keys, values = cache
        arrays = [x.contiguous() for x in layout]
        rows_T, _, places_T, known_T, paths_TA, lengths_T = (x.data_ptr() for x in arrays)
        where = native.CLayout(len(embeds_TD), rows_T, places_T, known_T, paths_TA, lengths_T, arrays[4].shape[1])
        slots = native.CCache(keys.data_ptr(), values.data_ptr(), keys.stride(0), keys.stride(1))
        cos, signed_sin = (rope_T21d[:, part].contiguous() for part in (0, 1))
        embeds_TD, hidden_TD = embeds_TD.contiguous(), hidden_TD.contiguous()
        y_TD = torch.empty_like(hidden_TD)
        self._library.tlt_eagle3_layer(
            ctypes.addressof(self._shape),
            ctypes.addressof(self._layer),
            cast(Tensor, self._model.hidden_norm.weight).data_ptr(),
            ctypes.addressof(slots),
            ctypes.addressof(where),
            cos.data_ptr(),
            signed_sin.data_ptr(),
            embeds_TD.data_ptr(),
            hidden_TD.data_ptr(),
            y_TD.data_ptr(),
        )
        return y_TD

    def chain(
        self,
        y_BD: Tensor,
        cache: tuple[Tensor, Tensor],
        *,
        ends_B: Tensor,
        keys_BL2: Tensor,
        ids_J: Tensor,
        embeddings_VD: Tensor,
        rope_C21d: Tensor,
        settings: tuple[float, ...],
    ) -> Children:
        """A chain of up to L tokens a row in one call: columns and path values, [B, levels drafted].

        y_BD: of each row's last position.  ends_B: position of the first drafted token.  keys_BL2: `draft_keys`.
        settings: temperature, error scale, least chance of a token and least sum of a level, see `tree`.
        """
        keys, values = cache
        live, levels = keys_BL2.shape[:2]
        arrays = [embeddings_VD, self._model.norm.weight, ids_J, rope_C21d, ends_B.contiguous(), keys_BL2.contiguous()]
        assert all(x.is_contiguous() for x in arrays), "the drafter's tables are contiguous"
        chain = native.CChain(*(x.data_ptr() for x in arrays), live, levels, len(rope_C21d), *settings)
        slots = native.CCache(keys.data_ptr(), values.data_ptr(), keys.stride(0), keys.stride(1))
        y_BD = y_BD.clone(memory_format=torch.contiguous_format)
        columns_BL = torch.empty(live, levels, dtype=torch.int64)
        values_BL = torch.empty(live, levels)
        done = ctypes.c_int64()
        self._library.tlt_eagle3_chain(
            ctypes.addressof(self._shape),
            ctypes.addressof(self._layer),
            cast(Tensor, self._model.hidden_norm.weight).data_ptr(),
            ctypes.addressof(panels_of(self._model.lm_head).struct),
            ctypes.addressof(slots),
            ctypes.addressof(chain),
            y_BD.data_ptr(),
            columns_BL.data_ptr(),
            values_BL.data_ptr(),
            ctypes.addressof(done),
        )
        return Children(columns_BL[:, : done.value], values_BL[:, : done.value])
