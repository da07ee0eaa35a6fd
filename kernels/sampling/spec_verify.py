"""Walk of a draft tree along the target's own choices.

Math.  Node t of a tree (the request's newest token, or a draft token) has the target's choice c_t for the position
after it.  Start at the newest token.  While a child of the current node holds the token that the target chose there, go
to that child.  The visited nodes are the accepted path; the choice at its last node is the bonus token:

    path_0 = root;   path_{i+1} = the child n of path_i with token_n = c_{path_i}, if there is one
    emitted tokens = c_{path_0}, c_{path_1}, ..., c_{path_a}        (a accepted draft tokens, a + 1 emitted)

On a GPU one kernel walks all trees, one program per request, instead of a few small kernels per level.

Shapes: B requests (rows of the live batch), N draft tokens of all rows, T = B + N nodes (the B newest tokens first),
A = depth + 1 tokens at most.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.dispatch import Impl, jit, native_library, power_of_two, tl, uses_triton


class AcceptedPath(NamedTuple):
    """Nodes whose choices are emitted."""

    nodes_BA: Tensor  # int64, index into the T nodes; the last one is repeated beyond the count
    counts_B: Tensor  # int64, emitted tokens, 1 .. A


def accepted_path(
    choice_T: Tensor,
    tokens_N: Tensor,
    parents_N: Tensor,
    rows_N: Tensor,
    *,
    num_rows: int,
    depth: int,
    impl: Impl = "auto",
) -> AcceptedPath:
    """See the module docstring.  All int64; parents_N: index into 0 .. N-1, -1 for the row's newest token.

    No host sync: the loop always runs to `depth`.  Of siblings with the same token the last is taken.
    """
    on_gpu, library = uses_triton(impl, choice_T, op="spec_verify"), native_library(impl, choice_T, op="spec_verify")
    if not on_gpu and library is None:
        return accepted_path_reference(choice_T, tokens_N, parents_N, rows_N, num_rows=num_rows, depth=depth)
    nodes_BA = torch.empty(num_rows, depth + 1, dtype=torch.int64, device=choice_T.device)
    counts_B = torch.empty(num_rows, dtype=torch.int64, device=choice_T.device)
    inputs = [x.contiguous() for x in (choice_T, tokens_N, parents_N, rows_N)]
    if library is not None:
        library.tlt_accepted_path(
            *(x.data_ptr() for x in inputs), len(tokens_N), num_rows, depth, nodes_BA.data_ptr(), counts_B.data_ptr()
        )
    elif num_rows:
        block = min(_MOST_NODES, max(16, power_of_two(len(tokens_N))))
        _walk[(num_rows,)](*inputs, nodes_BA, counts_B, len(tokens_N), num_rows, depth, BLOCK=block)
    return AcceptedPath(nodes_BA, counts_B)


def accepted_path_reference(
    choice_T: Tensor, tokens_N: Tensor, parents_N: Tensor, rows_N: Tensor, *, num_rows: int, depth: int
) -> AcceptedPath:
    device = choice_T.device
    current_B = torch.arange(num_rows, device=device)
    parent_T_N = torch.where(parents_N < 0, rows_N, parents_N + num_rows)
    node_N = torch.arange(num_rows, num_rows + len(tokens_N), device=device)
    hit_N = choice_T[parent_T_N] == tokens_N  # does the target choose this token at its parent?
    on_path = torch.zeros(num_rows + len(tokens_N), dtype=torch.bool, device=device)
    on_path[:num_rows].fill_(True)
    nodes, counts_B = [current_B], torch.ones_like(current_B)
    for _ in range(depth):
        taken_N = torch.where(hit_N & on_path[parent_T_N], node_N, -1)
        next_B = torch.full_like(current_B, -1).scatter_reduce_(0, rows_N, taken_N, "amax")
        on_path.zero_()
        on_path[next_B.clamp_min(0)] = next_B >= 0
        counts_B += next_B >= 0
        current_B = torch.where(next_B >= 0, next_B, current_B)
        nodes.append(current_B)
    return AcceptedPath(torch.stack(nodes, dim=1), counts_B)


_MOST_NODES = 1024  # draft tokens that a program reads at once


@jit("num_tokens", "num_rows", "depth")
def _walk(
    choice, tokens, parents, rows, nodes, counts, num_tokens, num_rows, depth, BLOCK: tl.constexpr,
):  # fmt: skip
    """Walks the tree of one row, level by level; each level reads all draft tokens, which are few."""
    row = tl.program_id(0)
    current, count, walking = row, row * 0 + 1, row >= 0
    chosen = tl.load(choice + current)
    at = row * (depth + 1)
    tl.store(nodes + at, current.to(tl.int64))
    for level in range(1, depth + 1):
        child = -1
        for first in range(0, num_tokens, BLOCK):
            node = first + tl.arange(0, BLOCK)
            there = node < num_tokens
            parent = tl.load(parents + node, mask=there, other=0)
            parent = tl.where(parent < 0, tl.load(rows + node, mask=there, other=0), parent + num_rows)
            hit = there & (parent == current) & (tl.load(tokens + node, mask=there, other=0) == chosen)
            child = tl.maximum(child, tl.max(tl.where(hit, node + num_rows, -1), axis=0))
        walking = walking & (child >= 0)
        current = tl.where(walking, child, current)
        count += walking.to(tl.int32)
        chosen = tl.load(choice + current)
        tl.store(nodes + at + level, current.to(tl.int64))
    tl.store(counts + row, count.to(tl.int64))
