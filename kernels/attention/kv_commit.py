"""Moves the keys and values of accepted draft tokens to their final positions.

A verification pass wrote the draft tokens of a request behind its newest token, in tree order.  The i-th token of the
accepted path is at place s_i of its slot and belongs to position t_i:

    cache[layer, slot, head, t_i] = cache[layer, slot, head, s_i]    for the i that are to be moved

This works in place.  A path is in tree order, and its i-th token comes after the i - 1 before it, so t_i <= s_i,
t_1 < t_2 < ... and s_1 < s_2 < ...  Moved in that order, a token overwrites only what is not read any more: t_i = s_j
means j <= i.  (The reference reads everything first, so it needs no order.)

Shapes: Y layers, S slots, B live ones, K key/value heads, C cache length, d head size, A tokens of a path at most.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kernels import native
from kernels.dispatch import Impl, jit, native_library, power_of_two, tl, uses_triton


def kv_commit(
    keys_YSKCd: Tensor,
    values_YSKCd: Tensor,
    sources_BA: Tensor,
    targets_BA: Tensor,
    moved_BA: Tensor | None,
    *,
    impl: Impl = "auto",
) -> None:
    """Entry b is slot b.  sources, targets: int64 places, as in the module docstring; moved_BA: bool, which to move.

    moved_BA None: all; paths shorter than A then repeat their last token.  In place.  Triton needs no host sync; torch
    needs one to count the moved tokens, unless all are moved.
    """
    on_gpu, library = uses_triton(impl, keys_YSKCd, op="kv_commit"), native_library(impl, keys_YSKCd, op="kv_commit")
    if not on_gpu and library is None:
        kv_commit_reference(keys_YSKCd, values_YSKCd, sources_BA, targets_BA, moved_BA)
        return
    if moved_BA is None:
        moved_BA = torch.ones_like(sources_BA, dtype=torch.bool)
    assert keys_YSKCd.stride() == values_YSKCd.stride(), "kv_commit: keys and values have the same layout"
    assert keys_YSKCd.stride(4) == 1, "kv_commit: the head size is the innermost axis of the cache"
    if not on_gpu and library is not None:
        _kv_commit_native(library, keys_YSKCd, values_YSKCd, sources_BA, targets_BA, moved_BA)
        return
    layers, _, num_kv, _, size = keys_YSKCd.shape
    live, longest = sources_BA.shape
    if live:
        _move_path[(layers, live, 2 * num_kv)](
            keys_YSKCd, values_YSKCd, sources_BA.contiguous(), targets_BA.contiguous(),
            moved_BA.contiguous().view(torch.uint8), longest, num_kv, size, *keys_YSKCd.stride()[:4],
            SIZE=power_of_two(size), num_warps=1,
        )  # fmt: skip


def _kv_commit_native(
    library: ctypes.CDLL, keys: Tensor, values: Tensor, sources_BA: Tensor, targets_BA: Tensor, moved_BA: Tensor
) -> None:
    layers, _, num_kv, _, size = keys.shape
    layer, slot, head, place = (stride * keys.element_size() for stride in keys.stride()[:4])
    assert place == size * keys.element_size(), "kv_commit: the places of a head are contiguous"
    shape = native.CCacheShape(layers, num_kv, place, layer, slot, head)
    inputs = [x.contiguous() for x in (sources_BA, targets_BA, moved_BA)]
    library.tlt_kv_commit(
        keys.data_ptr(), values.data_ptr(), ctypes.addressof(shape), *(x.data_ptr() for x in inputs), *moved_BA.shape
    )


def kv_commit_reference(
    keys_YSKCd: Tensor, values_YSKCd: Tensor, sources_BA: Tensor, targets_BA: Tensor, moved_BA: Tensor | None
) -> None:
    if moved_BA is None:
        slots_B1 = torch.arange(len(sources_BA), device=sources_BA.device)[:, None]
        for cache in (keys_YSKCd, values_YSKCd):
            cache[:, slots_B1, :, targets_BA] = cache[:, slots_B1, :, sources_BA]
        return
    slots = torch.arange(len(moved_BA), device=moved_BA.device)[:, None].expand(moved_BA.shape)[moved_BA]
    sources, targets = sources_BA[moved_BA], targets_BA[moved_BA]
    if len(slots):
        for cache in (keys_YSKCd, values_YSKCd):
            cache[:, slots, :, targets] = cache[:, slots, :, sources]


@jit("longest")
def _move_path(
    keys, values, sources, targets, moved, longest, num_kv, size,
    stride_layer, stride_slot, stride_head, stride_place, SIZE: tl.constexpr,
):  # fmt: skip
    """Moves the path of one layer, slot and head, of keys or values; each thread moves its features of every token."""
    layer, slot, half_head = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    head, feature = half_head % num_kv, tl.arange(0, SIZE)
    cache = values if half_head >= num_kv else keys
    cache += layer * stride_layer + slot.to(tl.int64) * stride_slot + head.to(tl.int64) * stride_head
    for i in range(longest):
        is_moved = (tl.load(moved + slot * longest + i) != 0) & (feature < size)
        source = tl.load(sources + slot * longest + i) * stride_place
        target = tl.load(targets + slot * longest + i) * stride_place
        tl.store(cache + target + feature, tl.load(cache + source + feature, mask=is_moved), mask=is_moved)
