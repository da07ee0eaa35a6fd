"""Attention of a fixed number of queries per request over its slot of a KV cache, with the lengths on the device.

Math.  Request b has base_b known keys, followed by the keys of its U newest nodes (a draft tree with its root): key
base_b + u belongs to node u.  Query n of token w sees every known key, and the nodes that sees_bwu names:

    out_n = sum_c p_nc v_c,   p_n = softmax_c(q_n . k_c / sqrt(d)) over c < base_b and c = base_b + u with sees_bwu

Decoding is U = 1, verification W = U, a level of a draft tree W < U; each of the G query heads of a key/value head is a
query of its own.  No shape depends on the lengths, so a captured graph replays one launch for all of them.  There is no
[W, C] mask, which at C = 32,768 would be larger than the keys.

On a GPU a Triton kernel reads every key once for all G heads and W tokens of its request.  A request's keys are split
among programs, as few requests with long contexts would leave most of the chip idle.  The number of splits is fixed by
the cache's length; how many keys a split takes follows the request's own length.  Each program keeps a running maximum
m, sum l of exp(s - m) and output o (FlashAttention's), and a second kernel joins the splits:
    out = sum_s e^(m_s - m) o_s / sum_s e^(m_s - m) l_s,   m = max_s m_s          (Flash-Decoding)
What lies behind a request's last node is not read.

Shapes: B requests, W tokens of each, K key/value heads, G query heads on each, N = W G query rows, U nodes, C length of
the cache, d head size; S splits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.dispatch import Impl, jit, power_of_two, tl, triton, uses_triton

_BLOCK_KEYS = 64
_MOST_OF_FOUR_WARPS = 4096  # entries of the output block; more would not fit into their registers
_MOST_ROWS = 64  # queries of one program
_PROGRAMS = 264  # in flight: two for each multiprocessor of a large GPU
_MOST_SPLITS = 64


def tree_attention(
    q_BKNd: Tensor, keys_BKCd: Tensor, values_BKCd: Tensor, bases_B: Tensor, sees_BWU: Tensor, *, impl: Impl = "auto"
) -> Tensor:
    """Returns [B, K, N, d].  Keys and values: views of a cache, any strides; queries in the order of their tokens.

    bases_B: int64, at most C - U.  sees_BWU: bool.  No host sync.  For inference: no gradient is tested.
    """
    if not uses_triton(impl, q_BKNd, op="tree_attention"):
        return tree_attention_reference(q_BKNd, keys_BKCd, values_BKCd, bases_B, sees_BWU)
    return _tree_attention_triton(q_BKNd, keys_BKCd, values_BKCd, bases_B, sees_BWU)


def attend_in_slots(
    q_THd: Tensor,
    k_TKd: Tensor,
    v_TKd: Tensor,
    keys_BKCd: Tensor,
    values_BKCd: Tensor,
    *,
    rows_B1: Tensor,
    places_BW: Tensor,
    bases_B: Tensor,
    sees_BWU: Tensor,
) -> Tensor:
    """`tree_attention` of W tokens of each request, row by row (T = B W), after writing their keys and values to these
    places of the cache.  rows_B1: 0 .. B-1, made once for all layers.  Returns [T, H, d]."""
    rows, width = places_BW.shape
    keys_BKCd[rows_B1, :, places_BW] = k_TKd.unflatten(0, (rows, width))
    values_BKCd[rows_B1, :, places_BW] = v_TKd.unflatten(0, (rows, width))
    q_BWKGd = q_THd.unflatten(1, (k_TKd.shape[1], -1)).unflatten(0, (rows, width))
    q_BKNd = q_BWKGd.transpose(1, 2).flatten(2, 3)
    out_BKNd = tree_attention(q_BKNd, keys_BKCd, values_BKCd, bases_B, sees_BWU)
    return out_BKNd.unflatten(2, (width, -1)).transpose(1, 2).flatten(2, 3).flatten(0, 1)


def tree_attention_reference(
    q_BKNd: Tensor, keys_BKCd: Tensor, values_BKCd: Tensor, bases_B: Tensor, sees_BWU: Tensor
) -> Tensor:
    """The specification; it reads the whole cache."""
    width, nodes = sees_BWU.shape[1:]
    node_BC = torch.arange(keys_BKCd.shape[2], device=bases_B.device) - bases_B[:, None]
    sees_BWC = sees_BWU.gather(2, node_BC.clamp(0, nodes - 1)[:, None].expand(-1, width, -1))
    sees_BWC &= ((node_BC >= 0) & (node_BC < nodes))[:, None]
    sees_BWC |= (node_BC < 0)[:, None]
    mask_BNC = sees_BWC.repeat_interleave(q_BKNd.shape[2] // width, dim=1)
    return F.scaled_dot_product_attention(q_BKNd, keys_BKCd, values_BKCd, attn_mask=mask_BNC[:, None])


def _tree_attention_triton(
    q_BKNd: Tensor, keys_BKCd: Tensor, values_BKCd: Tensor, bases_B: Tensor, sees_BWU: Tensor
) -> Tensor:
    live, num_kv, num_rows, size = q_BKNd.shape
    width, nodes = sees_BWU.shape[1:]
    assert keys_BKCd.stride() == values_BKCd.stride(), "tree_attention: keys and values have the same layout"
    assert keys_BKCd.stride(3) == 1, "tree_attention: the head size is the innermost axis of the cache"
    rows = min(_MOST_ROWS, max(16, power_of_two(num_rows)))
    row_blocks = -(-num_rows // rows)
    key_blocks = max(1, -(-keys_BKCd.shape[2] // _BLOCK_KEYS))
    wanted = -(-_PROGRAMS // max(1, live * num_kv * row_blocks))
    splits = min(_MOST_SPLITS, wanted, key_blocks)
    out_BKNd = torch.empty(q_BKNd.shape, dtype=q_BKNd.dtype, device=q_BKNd.device)
    if out_BKNd.numel() == 0:
        return out_BKNd
    parts_BKNSd = torch.empty(*q_BKNd.shape[:3], splits, size, dtype=torch.float32, device=q_BKNd.device)
    sums_2BKNS = torch.empty(2, *parts_BKNSd.shape[:4], dtype=torch.float32, device=q_BKNd.device)
    block_d = max(16, power_of_two(size))
    _attend_tree[(live * num_kv, row_blocks, splits)](
        q_BKNd.contiguous(), keys_BKCd, values_BKCd, bases_B.contiguous(), sees_BWU.contiguous().view(torch.uint8),
        parts_BKNSd, sums_2BKNS, num_kv, num_rows, width, nodes, size, splits, sums_2BKNS[0].numel(),
        keys_BKCd.stride(0), keys_BKCd.stride(1), keys_BKCd.stride(2), float(size**-0.5),
        ROWS=rows, KEYS=_BLOCK_KEYS, SIZE=block_d, WIDEN=bool(triton.knobs.runtime.interpret),
        num_warps=8 if rows * block_d > _MOST_OF_FOUR_WARPS else 4,
    )  # fmt: skip
    _join_splits[(live * num_kv * num_rows,)](
        parts_BKNSd, sums_2BKNS, out_BKNd, size, splits, sums_2BKNS[0].numel(),
        SPLITS=power_of_two(splits), SIZE=block_d,
    )  # fmt: skip
    return out_BKNd


@jit("num_rows", "splits", "plane")
def _attend_tree(
    queries, keys, values, bases, sees, parts, sums,
    num_kv, num_rows, width, nodes, size, splits, plane, stride_slot, stride_head, stride_key, scale,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SIZE: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Some queries of one key/value head against one part of the request's keys.

    WIDEN: to float32, where products of bfloat16 numbers are exact as in a GPU's matrix instruction.  Triton's
    interpreter stores bfloat16 numbers as integers and would multiply those.
    """
    request_head, split = tl.program_id(0).to(tl.int64), tl.program_id(2)
    request, head = request_head // num_kv, request_head % num_kv
    row, feature = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, SIZE)
    is_row, is_feature = row < num_rows, feature < size
    token = row // (num_rows // width)
    at_query = (request_head * num_rows + row)[:, None] * size + feature[None, :]
    q = tl.load(queries + at_query, mask=is_row[:, None] & is_feature[None, :], other=0.0)
    if WIDEN:
        q = q.to(tl.float32)
    base = tl.load(bases + request).to(tl.int32)
    end = base + nodes
    chunk = tl.cdiv(tl.cdiv(end, splits), KEYS) * KEYS
    cache = request * stride_slot + head * stride_head
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, SIZE], tl.float32)
    stop = tl.minimum(split * chunk + chunk, end)
    for first in range(split * chunk, stop, KEYS):
        key = first + tl.arange(0, KEYS)
        at_key = cache + key.to(tl.int64)[:, None] * stride_key + feature[None, :]
        is_key = (key < stop)[:, None] & is_feature[None, :]
        k = tl.load(keys + at_key, mask=is_key, other=0.0)
        v = tl.load(values + at_key, mask=is_key, other=0.0)
        node = key - base
        is_node = (node >= 0) & (key < stop)
        at_mask = (request * width + token)[:, None] * nodes + node[None, :]
        visible = tl.load(sees + at_mask, mask=is_row[:, None] & is_node[None, :], other=0)
        if WIDEN:
            k, v = k.to(tl.float32), v.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where((node < 0)[None, :] | (visible != 0), scores, float("-inf"))
        scores = tl.where((key < stop)[None, :], scores, float("-inf"))
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


@jit("splits", "plane")
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
