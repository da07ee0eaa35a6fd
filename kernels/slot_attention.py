"""Attention of a few queries of each live request over its own row of a KV cache: decoding, verification, drafting.

Math.  Query n of request b sees the keys c with visible_bwc (w its token; the G query heads of a key/value head are
stacked as query rows):   out_n = sum_c p_nc v_c,   p_n = softmax_c(q_n . k_c / sqrt(d) + m_nc),  m = 0 or -inf.

The rows of a cache lie apart from each other, by what a request may still grow.  On CPUs with bfloat16 instructions
copying the part in use together and running two batched products over it takes 0.3 to 0.6 of the time of torch's
attention kernel (an EPYC core; 4 requests, 600 keys, 11 tokens each: 0.46 ms against 1.62, a token each: 0.17 against
0.27), as long as there is enough to do; scores are then rounded to bfloat16 before the softmax, as in
`packed_attention`.

On a GPU a Triton kernel reads every key and value once for all G heads and W tokens of its request.  A request's keys
are split among programs, as few requests with long contexts would leave most of the chip idle; each program keeps a
running maximum m, sum l of exp(s - m) and output o (FlashAttention's), and a second kernel joins the splits:
    out = sum_s e^(m_s - m) o_s / sum_s e^(m_s - m) l_s,   m = max_s m_s          (Flash-Decoding)
What lies behind a request's last visible key is not read.  Its scores are never rounded to bfloat16.

Shapes: B requests, W tokens of the request that has most, K key/value heads, G query heads on each, N = W G query
rows, C cache positions in use, d head size; S splits of the positions.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.dispatch import Impl, jit, power_of_two, tl, uses_triton

_WORTH_COPYING = 1000  # requests * tokens * positions: below, torch's kernel is quicker than the copies


class SlotMask(NamedTuple):
    """What each query row sees, in the form that the chosen implementation wants; made once for all layers."""

    visible_B1NC: Tensor  # bool
    bias_MNC: Tensor | None  # 0 or -inf, M = B K; None: torch's kernel is to be used
    ends_B: Tensor | None = None  # int32, one past the last key that any token sees; None: Triton is not to be used

    @classmethod
    def of(cls, visible_BWC: Tensor, *, num_kv: int, grouped: int, dtype: torch.dtype, impl: Impl = "auto") -> SlotMask:
        """visible_BWC: bool, at least one key of each token (a token that sees none is 0 in Triton).  grouped: G.
        dtype: of queries and cache.  impl: see `kernels.dispatch`."""
        if uses_triton(impl, visible_BWC, op="slot_attention"):
            number_C = torch.arange(1, visible_BWC.shape[2] + 1, dtype=torch.int32, device=visible_BWC.device)
            ends_B = torch.where(visible_BWC.any(1), number_C, 0).amax(1)
            return cls(visible_BWC.repeat_interleave(grouped, dim=1)[:, None], None, ends_B)
        visible_B1NC = visible_BWC.repeat_interleave(grouped, dim=1)[:, None] if grouped > 1 else visible_BWC[:, None]
        if not _copies(visible_BWC.device.type, dtype) or visible_BWC.numel() < _WORTH_COPYING:
            return cls(visible_B1NC, None)
        zero = torch.zeros((), dtype=dtype)
        bias_B1NC = torch.where(visible_B1NC, zero, zero - torch.inf)
        return cls(visible_B1NC, bias_B1NC.expand(-1, num_kv, -1, -1).flatten(0, 1))


def slot_attention(q_BKNd: Tensor, keys_BKCd: Tensor, values_BKCd: Tensor, mask: SlotMask) -> Tensor:
    """Returns [B, K, N, d].  Keys and values: views of a cache, any strides.  For inference: no gradient is tested."""
    if mask.ends_B is not None:
        return _slot_attention_triton(q_BKNd, keys_BKCd, values_BKCd, mask.visible_B1NC, mask.ends_B)
    if mask.bias_MNC is None:
        return slot_attention_reference(q_BKNd, keys_BKCd, values_BKCd, mask)
    keys_MCd, values_MCd = (x.flatten(0, 1).contiguous() for x in (keys_BKCd, values_BKCd))
    scores_MNC = torch.baddbmm(mask.bias_MNC, q_BKNd.flatten(0, 1), keys_MCd.mT, alpha=q_BKNd.shape[-1] ** -0.5)
    return torch.bmm(scores_MNC.softmax(-1), values_MCd).view(q_BKNd.shape)


def slot_attention_reference(q_BKNd: Tensor, keys_BKCd: Tensor, values_BKCd: Tensor, mask: SlotMask) -> Tensor:
    """One call of torch's kernel."""
    return F.scaled_dot_product_attention(q_BKNd, keys_BKCd, values_BKCd, attn_mask=mask.visible_B1NC)


@functools.cache
def _copies(device_type: str, dtype: torch.dtype) -> bool:
    return device_type == "cpu" and dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


_BLOCK_KEYS = 64
_MOST_ROWS = 64  # query rows of one program
_PROGRAMS = 264  # wanted in flight: two for each multiprocessor of a large GPU
_MOST_SPLITS = 64


def _slot_attention_triton(
    q_BKNd: Tensor, keys_BKCd: Tensor, values_BKCd: Tensor, visible_B1NC: Tensor, ends_B: Tensor
) -> Tensor:
    live, num_kv, num_rows, size = q_BKNd.shape
    seen = keys_BKCd.shape[2]
    assert keys_BKCd.stride() == values_BKCd.stride(), "slot_attention: keys and values are laid out alike"
    assert keys_BKCd.stride(3) == 1, "slot_attention: the head size is the innermost axis of the cache"
    rows = min(_MOST_ROWS, max(16, power_of_two(num_rows)))
    row_blocks = -(-num_rows // rows)
    key_blocks = max(1, -(-seen // _BLOCK_KEYS))
    wanted = -(-_PROGRAMS // max(1, live * num_kv * row_blocks))
    chunk = -(-key_blocks // min(_MOST_SPLITS, wanted, key_blocks)) * _BLOCK_KEYS
    splits = max(1, -(-seen // chunk))
    out_BKNd = torch.empty(q_BKNd.shape, dtype=q_BKNd.dtype, device=q_BKNd.device)
    parts_BKNSd = torch.empty(*q_BKNd.shape[:3], splits, size, dtype=torch.float32, device=q_BKNd.device)
    sums_2BKNS = torch.empty(2, *parts_BKNSd.shape[:4], dtype=torch.float32, device=q_BKNd.device)
    if out_BKNd.numel() == 0:
        return out_BKNd
    block_d = max(16, power_of_two(size))
    _attend_split[(live * num_kv, row_blocks, splits)](
        q_BKNd.contiguous(), keys_BKCd, values_BKCd, visible_B1NC.view(torch.uint8), ends_B, parts_BKNSd, sums_2BKNS,
        num_kv, num_rows, seen, size, chunk, splits, sums_2BKNS[0].numel(),
        keys_BKCd.stride(0), keys_BKCd.stride(1), keys_BKCd.stride(2), float(size**-0.5),
        ROWS=rows, KEYS=_BLOCK_KEYS, SIZE=block_d, WIDEN=not q_BKNd.is_cuda,
    )  # fmt: skip
    _join_splits[(live * num_kv * num_rows,)](
        parts_BKNSd, sums_2BKNS, out_BKNd, size, splits, sums_2BKNS[0].numel(),
        SPLITS=power_of_two(splits), SIZE=block_d,
    )  # fmt: skip
    return out_BKNd


@jit
def _attend_split(
    queries, keys, values, visible, ends, parts, sums,
    num_kv, num_rows, seen, size, chunk, splits, plane, stride_slot, stride_head, stride_key, scale,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SIZE: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Some query rows of one key/value head against one part of the request's keys.

    WIDEN: Triton's interpreter multiplies bfloat16 numbers as the integers that it stores them in; in float32 their
    products are exact, as they are in a GPU's matrix instruction.
    """
    request_head, split = tl.program_id(0).to(tl.int64), tl.program_id(2)
    request, head = request_head // num_kv, request_head % num_kv
    row, feature = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, SIZE)
    is_row, is_feature = row < num_rows, feature < size
    at_query = (request_head * num_rows + row)[:, None] * size + feature[None, :]
    q = tl.load(queries + at_query, mask=is_row[:, None] & is_feature[None, :], other=0.0)
    if WIDEN:
        q = q.to(tl.float32)
    cache = request * stride_slot + head * stride_head
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, SIZE], tl.float32)
    stop = tl.minimum(split * chunk + chunk, tl.load(ends + request))
    for first in range(split * chunk, stop, KEYS):
        key = first + tl.arange(0, KEYS)
        at_key = cache + key.to(tl.int64)[:, None] * stride_key + feature[None, :]
        is_key = (key < stop)[:, None] & is_feature[None, :]
        k = tl.load(keys + at_key, mask=is_key, other=0.0)
        v = tl.load(values + at_key, mask=is_key, other=0.0)
        at_mask = (request * num_rows + row)[:, None] * seen + key[None, :]
        sees = tl.load(visible + at_mask, mask=is_row[:, None] & (key < stop)[None, :], other=0)
        if WIDEN:
            k, v = k.to(tl.float32), v.to(tl.float32)
        scores = tl.where(sees != 0, tl.dot(q, tl.trans(k), input_precision="ieee") * scale, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        p, decay = tl.exp(scores - shift[:, None]), tl.exp(top - shift)
        p_narrow = p.to(queries.dtype.element_ty).to(v.dtype)
        out = out * decay[:, None] + tl.dot(p_narrow, v, input_precision="ieee")
        total = total * decay + tl.sum(p, axis=1)
        top = new_top
    at_sum = (request_head * num_rows + row) * splits + split
    tl.store(sums + at_sum, top, mask=is_row)
    tl.store(sums + plane + at_sum, total, mask=is_row)
    at_part = at_sum[:, None] * size + feature[None, :]
    tl.store(parts + at_part, out, mask=is_row[:, None] & is_feature[None, :])


@jit
def _join_splits(parts, sums, outs, size, splits, plane, SPLITS: tl.constexpr, SIZE: tl.constexpr):
    row, split, feature = tl.program_id(0).to(tl.int64), tl.arange(0, SPLITS), tl.arange(0, SIZE)
    used, is_feature = split < splits, feature < size
    tops = tl.load(sums + row * splits + split, mask=used, other=float("-inf"))
    top = tl.max(tops, axis=0)
    weights = tl.exp(tops - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(weights * tl.load(sums + plane + row * splits + split, mask=used, other=0.0), axis=0)
    at_part = (row * splits + split)[:, None] * size + feature[None, :]
    part = tl.load(parts + at_part, mask=used[:, None] & is_feature[None, :], other=0.0)
    out = tl.sum(part * weights[:, None], axis=0) / tl.where(total == 0.0, 1.0, total)
    tl.store(outs + row * size + feature, out.to(outs.dtype.element_ty), mask=is_feature)
