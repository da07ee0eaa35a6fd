"""The tokens of a verification pass: their places in the cache, their positions, and what each of them sees.

The newest token of request b has position p_b and place p_b of slot b; the draft tokens follow it in tree order:

    place of the i-th draft token = p_b + 1 + i          position of a token at depth e = p_b + e

Every token sees the places 0 .. p_b of its slot and, behind them, its path: its ancestors among the drafts, and itself.

Shapes: B requests, N draft tokens in the order of their slots, T = B + N tokens (the B newest first), A longest path.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.dispatch import Impl, native_library


class TreeLayout(NamedTuple):
    """All int64."""

    rows_T: Tensor  # live slot
    positions_T: Tensor  # in the sequence
    places_T: Tensor  # in the slot
    known_T: Tensor  # places before this one are visible
    paths_TA: Tensor  # visible places behind them, in the order of the sequence; the own place beyond the length
    lengths_T: Tensor  # of the paths


def tree_layout(
    positions_B: Tensor, parents_N: Tensor, rows_N: Tensor, depths_N: Tensor, *, depth: int, impl: Impl = "auto"
) -> TreeLayout:
    """All int64; positions_B: of the newest tokens; parents_N: index into 0 .. N-1, -1 for a row's newest token;
    depths_N: 1 for its children.  depth: A, at least the deepest token's."""
    library = native_library(impl, positions_B, op="tree_layout")
    if library is None:
        return tree_layout_reference(positions_B, parents_N, rows_N, depths_N, depth=depth)
    live, drafts = len(positions_B), len(rows_N)
    out_5T = torch.empty(5, live + drafts, dtype=torch.int64)
    paths_TA = torch.empty(live + drafts, depth, dtype=torch.int64)
    rows_T, positions_T, places_T, known_T, lengths_T = out_5T.unbind()
    inputs = [x.contiguous() for x in (positions_B, parents_N, rows_N, depths_N)]
    at_positions, *at_tree = (x.data_ptr() for x in inputs)
    library.tlt_tree_layout(
        at_positions, live, *at_tree, drafts, depth,
        *(x.data_ptr() for x in (rows_T, positions_T, places_T, known_T, paths_TA, lengths_T)),
    )  # fmt: skip
    return TreeLayout(rows_T, positions_T, places_T, known_T, paths_TA, lengths_T)


def tree_layout_reference(
    positions_B: Tensor, parents_N: Tensor, rows_N: Tensor, depths_N: Tensor, *, depth: int
) -> TreeLayout:
    live, device = len(positions_B), positions_B.device
    counts_B = torch.zeros_like(positions_B).index_add_(0, rows_N, torch.ones_like(rows_N))
    own_N = torch.arange(len(rows_N), device=device)
    columns_N = own_N - (counts_B.cumsum(0) - counts_B)[rows_N] + 1
    rows_T = torch.cat([torch.arange(live, device=device), rows_N])
    lengths_T = torch.cat([torch.zeros_like(positions_B), depths_N])
    newest_T = positions_B[rows_T]
    places_T = torch.cat([positions_B, positions_B[rows_N] + columns_N])
    paths_TA = places_T[:, None].repeat(1, depth)
    up_N = own_N  # from each token up to the newest, one level at a time
    for level in range(depth):
        at_N = depths_N - 1 - level
        on_N = at_N >= 0
        paths_TA[own_N[on_N] + live, at_N[on_N]] = places_T[up_N[on_N] + live]
        up_N = torch.where(on_N, parents_N[up_N], up_N).clamp_min(0)
    return TreeLayout(rows_T, newest_T + lengths_T, places_T, newest_T + 1, paths_TA, lengths_T)


_BLOCK = 16  # of `native/attention.c`, where tokens share the work on known whole blocks


def prompt_layout(rows_T: Tensor, places_T: Tensor) -> TreeLayout:
    """For prompts: each token sees all tokens before it, the last few of them as its path."""
    known_T, lengths_T = places_T // _BLOCK * _BLOCK, places_T % _BLOCK + 1
    offsets_A = torch.arange(_BLOCK, device=places_T.device)
    paths_TA = known_T[:, None] + torch.minimum(offsets_A, lengths_T[:, None] - 1)
    return TreeLayout(rows_T, places_T, places_T, known_T, paths_TA, lengths_T)
