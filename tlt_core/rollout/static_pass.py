"""The round in fixed shapes, for graphs: every row has W nodes, and rows are filled up to a bucket.

    newest tokens + PaddedTree -> nodes -> spec_round -> buffers of the batch

`spec_round` does what it does for packed nodes, so its theorem holds here, too.  Padding changes nothing that is used:
- An unused node carries token 0 at the newest token's position, and no other node sees it.  As a draft token it is -1,
  which the target never chooses.
- Keys and values of unused and of rejected nodes lie behind the row's known tokens, where the next round writes before
  it reads.
- A row of padding works in a slot of the cache that has no request.

No operation depends on a value that only the host could know: every call makes the same launches.

Shapes: B rows, W nodes of each with its newest token, U = W - 1, A tokens that it may emit, T = B W; E tapped width,
D hidden size, V vocabulary, K key/value heads, G query heads on each, C cache positions, d head size.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.sampling.spec_verify import AcceptedPath, accepted_path
from kernels.tree.tree_attention import attend_in_slots
from tlt_core.items.hidden_states import PathStates
from tlt_core.items.static_shapes import Inputs, PaddedTree
from tlt_core.items.types import SamplingParams
from tlt_core.model.decoder import Decoder
from tlt_core.rollout.kv_cache import SlotCache
from tlt_core.rollout.spec_round import Nodes, spec_round


class PassShape(NamedTuple):
    """A bucket."""

    rows: int  # B
    width: int  # W; 1: plain decoding
    emitted: int  # A


class StaticTarget(NamedTuple):
    """What a pass works on; none of it moves."""

    decoder: Decoder
    cache: SlotCache
    inputs: Inputs
    tree: PaddedTree
    report_BP: Tensor  # see `StaticBatch`
    states: PathStates | None  # gets the round's; None: no hidden states are wanted
    taps: tuple[int, ...]


@torch.inference_mode()
def static_pass(target: StaticTarget, shape: PassShape, params: SamplingParams) -> None:
    """One round of the first `shape.rows` rows, padding included."""
    rows, width, _ = shape
    inputs, tree = target.inputs, target.tree.part(rows, width)
    nodes = padded_nodes(target.cache, inputs, tree, shape)
    emitted, states = spec_round(target.decoder, target.cache, nodes, params, taps=target.taps)
    emitted.append_to(inputs.tokens_BC[:rows], inputs.logprobs_BC[:rows], inputs.lengths_B[:rows])
    report_BP = target.report_BP[:rows]
    report_BP[:, : emitted.tokens_BA.shape[1]] = emitted.tokens_BA
    report_BP[:, -3] = emitted.counts_B
    report_BP[:, -2] = (tree.tokens_BU >= 0).sum(1)
    report_BP[:, -1] = tree.depths_BU.amax(1) if width > 1 else torch.zeros_like(emitted.counts_B)
    if target.states is not None and states is not None:
        for buffer, values in zip(target.states, states, strict=True):
            buffer[: len(values)].copy_(values)


def padded_nodes(cache: SlotCache, inputs: Inputs, tree: PaddedTree, shape: PassShape) -> Nodes:
    """W nodes of each row, row by row, the newest token first."""
    rows, width, emitted = shape
    bases_B = inputs.lengths_B[:rows] - 1
    newest_B1 = inputs.tokens_BC[:rows].gather(1, bases_B[:, None])
    depths_BW = torch.cat([torch.zeros_like(newest_B1), tree.depths_BU], dim=1)
    places_BW = bases_B[:, None] + torch.arange(width, device=bases_B.device)
    rows_B1 = torch.arange(rows, device=bases_B.device)[:, None]
    sees_BWW = ancestors(tree, depth=emitted - 1)
    at = {"rows_B1": rows_B1, "places_BW": places_BW, "bases_B": bases_B, "sees_BWU": sees_BWW}

    def attend(layer: int, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> Tensor:
        keys_BKCd, values_BKCd = cache.keys_YSKCd[layer, :rows], cache.values_YSKCd[layer, :rows]
        return attend_in_slots(q_THd, k_TKd, v_TKd, keys_BKCd, values_BKCd, **at)

    def walk(choice_T: Tensor) -> AcceptedPath:
        if width == 1:
            return AcceptedPath(rows_B1, torch.ones_like(bases_B))
        choice_BW = choice_T.unflatten(0, (rows, width))
        nodes_BA, counts_B = accepted_path(
            torch.cat([choice_BW[:, 0], choice_BW[:, 1:].flatten()]),  # newest tokens first, then the drafts
            tree.tokens_BU.flatten(),
            torch.where(tree.parents_BU < 0, -1, tree.parents_BU + rows_B1 * (width - 1)).flatten(),
            rows_B1.expand(-1, width - 1).flatten(),
            num_rows=rows,
            depth=emitted - 1,
        )
        columns_BA = torch.where(nodes_BA < rows, 0, (nodes_BA - rows) % (width - 1) + 1)
        return AcceptedPath(rows_B1 * width + columns_BA, counts_B)

    return Nodes(
        torch.cat([newest_B1, tree.tokens_BU.clamp_min(0)], dim=1).flatten(),
        rows_B1.expand(-1, width).flatten(),
        (bases_B[:, None] + depths_BW).flatten(),
        places_BW.flatten(),
        inputs.streams_B[:rows, None].expand(-1, width).flatten(),
        attend,
        walk,
        fixed=True,
    )


def ancestors(tree: PaddedTree, *, depth: int) -> Tensor:
    """Who sees whom among a row's nodes, the newest token first, [B, W, W] bool: a node sees itself and its ancestors.

    The relation "itself or its parent" is squared: after k squarings a node sees its ancestors up to 2^k levels above.
    """
    rows, drafted = tree.parents_BU.shape
    at_W = torch.arange(drafted + 1, device=tree.parents_BU.device)
    sees_BWW = (at_W[:, None] == at_W).expand(rows, -1, -1)
    if not drafted:
        return sees_BWW
    parents_BW = torch.cat([torch.zeros_like(tree.parents_BU[:, :1]), tree.parents_BU + 1], dim=1)
    sees_BWW = sees_BWW | (parents_BW[:, :, None] == at_W)
    for _ in range(max(0, (depth - 1).bit_length())):
        sees_BWW = (sees_BWW[..., None] & sees_BWW[:, None]).any(2)
    return sees_BWW
