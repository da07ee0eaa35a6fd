"""Walk of a draft tree along the target's own choices.

Math.  Node t of a tree (the row's newest token, or a draft token) has the target's choice c_t for the position after
it.  Starting at the newest token, as long as a child of the current node carries the token that the target chose
there, go to that child.  The nodes passed are the accepted path; the choice at its last node is the bonus token:

    path_0 = root;   path_{i+1} = the child n of path_i with token_n = c_{path_i}, if there is one
    emitted tokens = c_{path_0}, c_{path_1}, ..., c_{path_a}        (a accepted draft tokens, a + 1 emitted)

Shapes: B rows, N draft tokens of all rows, T = B + N nodes (the B newest tokens first), A = depth + 1 tokens at most.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class AcceptedPath(NamedTuple):
    """Nodes whose choices are emitted."""

    nodes_BA: Tensor  # int64, index into the T nodes; beyond the count: the last one again
    counts_B: Tensor  # int64, emitted tokens, 1 .. A


def accepted_path(
    choice_T: Tensor, tokens_N: Tensor, parents_N: Tensor, rows_N: Tensor, *, num_rows: int, depth: int
) -> AcceptedPath:
    """See the module docstring.  All int64; parents_N: index into 0 .. N-1, -1 for the row's newest token.

    No host sync: the loop runs to `depth` in any case.  Siblings with the same token: the last one is taken.
    """
    device = choice_T.device
    current_B = torch.arange(num_rows, device=device)
    parent_T_N = torch.where(parents_N < 0, rows_N, parents_N + num_rows)
    node_N = torch.arange(num_rows, num_rows + len(tokens_N), device=device)
    hit_N = choice_T[parent_T_N] == tokens_N  # does the target choose this token at its parent?
    on_path = torch.zeros(num_rows + len(tokens_N), dtype=torch.bool, device=device)
    on_path[:num_rows] = True
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
