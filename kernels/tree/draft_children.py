"""A drafter's best guesses for a position, given the noise with which the target will choose there.

    s_v = z_v / T + g_v     z: the drafter's logits, g: the position's noise (`coupled_sample`); T = 0: s = z
    children: the w largest s;    value of child v: log softmax(s / c)_v,  c the drafter's error scale

Shapes: N positions, J draft vocabulary, w children.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.dispatch import Impl, native_library
from kernels.sampling.coupled_sample import gumbel_noise


class Children(NamedTuple):
    """Best first."""

    columns_Nw: Tensor  # int64, in J
    values_Nw: Tensor  # float32


def draft_children(
    logits_NJ: Tensor,
    keys_N2: Tensor,
    ids_J: Tensor,
    *,
    width: int,
    temperature: float,
    error_scale: float,
    impl: Impl = "auto",
) -> Children:
    """keys_N2: int32, as in `coupled_sample`; ids_J: int32, the tokens of the columns."""
    library = native_library(impl, logits_NJ, op="draft_children") if logits_NJ.dtype == torch.bfloat16 else None
    if library is None:
        scores_NJ = logits_NJ.float() / (temperature or 1.0)
        if temperature:
            scores_NJ += gumbel_noise(keys_N2, ids_J)
        return best_children(scores_NJ, width=width, error_scale=error_scale)
    logits_NJ, keys_N2 = logits_NJ.contiguous(), keys_N2.contiguous()
    columns_Nw = torch.empty(len(logits_NJ), width, dtype=torch.int64)
    values_Nw = torch.empty(len(logits_NJ), width)
    library.tlt_draft_children(
        logits_NJ.data_ptr(), keys_N2.data_ptr(), ids_J.data_ptr(), *logits_NJ.shape, temperature, error_scale, width,
        columns_Nw.data_ptr(), values_Nw.data_ptr(),
    )  # fmt: skip
    return Children(columns_Nw, values_Nw)


def best_children(scores_NJ: Tensor, *, width: int, error_scale: float) -> Children:
    """The specification, given s."""
    scaled_NJ = scores_NJ if error_scale == 1 else scores_NJ / error_scale
    best = scaled_NJ.topk(width, dim=-1) if width > 1 else scaled_NJ.max(dim=-1, keepdim=True)
    return Children(best.indices, best.values - scaled_NJ.logsumexp(-1, keepdim=True))
