"""Walk of a draft tree along the target's own choices.

Math.  Node t of a tree (the row's newest token, or a draft token) has the target's choice c_t for the position after
it.  Starting at the newest token, as long as a child of the current node carries the token that the target chose
there, go to that child.  The nodes passed are the accepted path; the choice at its last node is the bonus token:

    path_0 = root;   path_{i+1} = the child n of path_i with token_n = c_{path_i}, if there is one
    emitted tokens = c_{path_0}, c_{path_1}, ..., c_{path_a}        (a accepted draft tokens, a + 1 emitted)

On a GPU one program walks each row's tree, with the whole round in one kernel instead of a few small ones for each
level; `spec_verify` also gathers what is emitted.

Shapes: B rows, N draft tokens of all rows, T = B + N nodes (the B newest tokens first), A = depth + 1 tokens at most.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.dispatch import Impl, jit, native_library, power_of_two, tl, uses_triton


class AcceptedPath(NamedTuple):
    """Nodes whose choices are emitted."""

    nodes_BA: Tensor  # int64, index into the T nodes; beyond the count: the last one again
    counts_B: Tensor  # int64, emitted tokens, 1 .. A


class Verified(NamedTuple):
    """What a round emits."""

    path: AcceptedPath
    tokens_BA: Tensor  # int64, the target's choices on the path; beyond the count: the bonus token again
    logprobs_BA: Tensor  # float32, of those tokens


def spec_verify(
    choice_T: Tensor,
    logprobs_T: Tensor,
    tokens_N: Tensor,
    parents_N: Tensor,
    rows_N: Tensor,
    *,
    num_rows: int,
    depth: int,
    impl: Impl = "auto",
) -> Verified:
    """`accepted_path`, and the tokens on it with their log-probabilities (logprobs_T: float32, of the choices)."""
    if not uses_triton(impl, choice_T, op="spec_verify"):
        path = accepted_path_reference(choice_T, tokens_N, parents_N, rows_N, num_rows=num_rows, depth=depth)
        return Verified(path, choice_T[path.nodes_BA], logprobs_T[path.nodes_BA])
    nodes_BA, tokens_BA = torch.empty(2, num_rows, depth + 1, dtype=torch.int64, device=choice_T.device)
    logprobs_BA = torch.empty(num_rows, depth + 1, dtype=torch.float32, device=choice_T.device)
    counts_B = torch.empty(num_rows, dtype=torch.int64, device=choice_T.device)
    if num_rows:
        block = min(_MOST_NODES, max(16, power_of_two(len(tokens_N))))
        inputs = (x.contiguous() for x in (choice_T, logprobs_T, tokens_N, parents_N, rows_N))
        _walk[(num_rows,)](
            *inputs, nodes_BA, tokens_BA, logprobs_BA, counts_B, len(tokens_N), num_rows, depth, BLOCK=block
        )
    return Verified(AcceptedPath(nodes_BA, counts_B), tokens_BA, logprobs_BA)


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

    No host sync: the loop runs to `depth` in any case.  Siblings with the same token: the last one is taken.
    """
    if uses_triton(impl, choice_T, op="spec_verify"):
        unused_T = torch.empty(choice_T.shape, dtype=torch.float32, device=choice_T.device)
        tree = (tokens_N, parents_N, rows_N)
        return spec_verify(choice_T, unused_T, *tree, num_rows=num_rows, depth=depth, impl="triton").path
    library = native_library(impl, choice_T, op="accepted_path")
    if library is None:
        return accepted_path_reference(choice_T, tokens_N, parents_N, rows_N, num_rows=num_rows, depth=depth)
    nodes_BA = torch.empty(num_rows, depth + 1, dtype=torch.int64)
    counts_B = torch.empty(num_rows, dtype=torch.int64)
    inputs = [x.contiguous() for x in (choice_T, tokens_N, parents_N, rows_N)]
    library.tlt_accepted_path(
        *(x.data_ptr() for x in inputs), len(tokens_N), num_rows, depth, nodes_BA.data_ptr(), counts_B.data_ptr()
    )
    return AcceptedPath(nodes_BA, counts_B)


def accepted_path_reference(
    choice_T: Tensor, tokens_N: Tensor, parents_N: Tensor, rows_N: Tensor, *, num_rows: int, depth: int
) -> AcceptedPath:
    """The specification."""
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


_MOST_NODES = 1024  # draft tokens that a program looks at together


@jit
def _walk(
    choice, logprob, tokens, parents, rows, nodes, emitted, emitted_logprob, counts,
    num_tokens, num_rows, depth, BLOCK: tl.constexpr,
):  # fmt: skip
    """The tree of one row, level by level; every level looks at all draft tokens, which are few."""
    row = tl.program_id(0)
    current, count, walking = row, row * 0 + 1, row >= 0
    chosen = tl.load(choice + current)
    at = row * (depth + 1)
    tl.store(nodes + at, current.to(tl.int64))
    tl.store(emitted + at, chosen)
    tl.store(emitted_logprob + at, tl.load(logprob + current))
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
        tl.store(emitted + at + level, chosen)
        tl.store(emitted_logprob + at + level, tl.load(logprob + current))
    tl.store(counts + row, count.to(tl.int64))
