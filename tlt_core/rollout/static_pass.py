"""The target's pass of a round in fixed shapes: verification of padded draft trees, and plain decoding as width 1.

    newest tokens + PaddedTree -> decoder, each node seeing the known keys and its ancestors -> the target's choice at
    every node -> walk -> emitted tokens into the batch's buffers, accepted keys and values into place

What is computed for a node that is used is what `spec_round` computes for it, so its theorem holds here, too.  An
unused place carries token 0 and the newest token's position, is seen by nobody, and as a draft token it is -1, which no
target chooses.  Its keys and values, like those of rejected nodes, lie behind the row's known tokens, where the next
round writes before it reads.  A row of padding works in a cache slot that has no request.

Nothing here depends on a value that only the host could know: the same launches in every call.

Shapes: B rows, W nodes of each with its newest token, U = W - 1, A tokens that it may emit, T = B W; E tapped width,
D hidden size, V vocabulary, K key/value heads, G query heads on each, C cache positions, d head size.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.kv_commit import kv_commit
from kernels.spec_verify import spec_verify
from kernels.tree_attention import tree_attention
from tlt_core.model.decoder import Attend, Decoder
from tlt_core.rollout.kv_cache import SlotCache
from tlt_core.sampling import Choice, choose_no_sync, lognorms, row_keys
from tlt_core.static_shapes import Inputs, PaddedTree
from tlt_core.types import SamplingParams


class PassShape(NamedTuple):
    """A bucket."""

    rows: int  # B
    width: int  # W; 1: plain decoding
    emitted: int  # A


class Path(NamedTuple):
    """What a pass knows of the tokens that it emitted, as in `RoundResult`; flat, row by row, A of each row.

    What a row lacks to A is its last one again: writing it twice writes the same.
    """

    tapped_rows_T: Tensor  # int64
    tapped_positions_T: Tensor  # int64, of the node where the token was chosen
    taps_TE: Tensor | None
    last_TD: Tensor  # after the final norm
    lognorms_T: Tensor  # float32

    def part(self, count: int) -> "Path":
        """The first `count`."""
        return Path(*(None if x is None else x[:count] for x in self))  # type: ignore[arg-type]


class StaticTarget(NamedTuple):
    """What a pass works on; none of it moves."""

    decoder: Decoder
    cache: SlotCache
    inputs: Inputs
    tree: PaddedTree
    report_BP: Tensor  # see `StaticBatch`
    path: Path  # empty (no element) where nobody wants hidden states
    taps: tuple[int, ...]


@torch.inference_mode()
def static_pass(target: StaticTarget, shape: PassShape, params: SamplingParams) -> None:
    """One round of the first `shape.rows` rows, padding included."""
    rows, width, emitted = shape
    inputs = target.inputs
    bases_B = inputs.lengths_B[:rows] - 1
    newest_B1 = inputs.tokens_BC[:rows].gather(1, bases_B[:, None])
    tree = target.tree.part(rows, width)
    tokens_BW = torch.cat([newest_B1, tree.tokens_BU.clamp_min(0)], dim=1)
    depths_BW = torch.cat([torch.zeros_like(newest_B1), tree.depths_BU], dim=1)
    positions_BW = bases_B[:, None] + depths_BW
    attend = attend_in_slots(target.cache, bases_B, ancestors(tree, depth=emitted - 1))
    hidden = target.decoder(tokens_BW.flatten(), positions_BW.flatten(), attend, taps=target.taps)
    logits_TV = target.decoder.logits(hidden.last_TD)
    streams_BW = inputs.streams_B[:rows, None].expand(-1, width)
    keys_T2 = row_keys(streams_BW.flatten(), positions_BW.flatten() + 1)
    choice = choose_no_sync(logits_TV, keys_T2, params)

    columns_BA, tokens_BA, logprobs_BA, counts_B = _walk(choice, tree, shape)
    at_BA = bases_B[:, None] + 1 + torch.arange(emitted, device=bases_B.device)
    inputs.tokens_BC[:rows].scatter_(1, at_BA, tokens_BA)  # beyond the count: overwritten by the next round
    inputs.logprobs_BC[:rows].scatter_(1, at_BA, logprobs_BA)
    _report(target.report_BP[:rows], tokens_BA, counts_B, tree)
    path_positions_BA = positions_BW.gather(1, columns_BA)
    if width > 1:
        cache = target.cache
        kv_commit(cache.keys_YSKCd, cache.values_YSKCd, bases_B[:, None] + columns_BA, path_positions_BA, None)
    if target.path.last_TD.numel():
        flat_T = (torch.arange(rows, device=bases_B.device)[:, None] * width + columns_BA).flatten()
        chosen = Choice(*(x[flat_T] for x in choice))
        own = target.path.part(len(flat_T))
        own.tapped_positions_T.copy_(path_positions_BA.flatten())
        own.tapped_rows_T.copy_(flat_T // width)
        own.last_TD.copy_(hidden.last_TD[flat_T])
        own.lognorms_T.copy_(lognorms(logits_TV[flat_T], chosen, params))
        if own.taps_TE is not None and hidden.taps_TE is not None:
            own.taps_TE.copy_(hidden.taps_TE[flat_T])


def ancestors(tree: PaddedTree, *, depth: int) -> Tensor:
    """Who sees whom among a row's nodes, the newest token first, [B, W, W] bool: a node sees itself and its ancestors.

    Closure of "itself or its parent" by squaring: after k squarings, ancestors up to 2^k above.
    """
    rows, drafted = tree.parents_BU.shape
    at_W = torch.arange(drafted + 1, device=tree.parents_BU.device)
    parents_BW = torch.cat([torch.zeros_like(tree.parents_BU[:, :1]), tree.parents_BU + 1], dim=1) if drafted else None
    sees_BWW = (at_W[:, None] == at_W).expand(rows, -1, -1)
    if parents_BW is None:
        return sees_BWW
    sees_BWW = sees_BWW | (parents_BW[:, :, None] == at_W)
    for _ in range(max(0, (depth - 1).bit_length())):
        sees_BWW = (sees_BWW[..., None] & sees_BWW[:, None]).any(2)
    return sees_BWW


def attend_in_slots(cache: SlotCache, bases_B: Tensor, sees_BWW: Tensor) -> Attend:
    """Attention of W tokens of each slot, at the places from bases_B on, which it writes."""
    rows, width = sees_BWW.shape[:2]
    rows_B1 = torch.arange(rows, device=bases_B.device)[:, None]
    places_BW = bases_B[:, None] + torch.arange(width, device=bases_B.device)

    def attend(layer: int, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> Tensor:
        keys_BKCd, values_BKCd = cache.keys_YSKCd[layer, :rows], cache.values_YSKCd[layer, :rows]
        keys_BKCd[rows_B1, :, places_BW] = k_TKd.unflatten(0, (rows, width))
        values_BKCd[rows_B1, :, places_BW] = v_TKd.unflatten(0, (rows, width))
        q_BWKGd = q_THd.unflatten(1, (k_TKd.shape[1], -1)).unflatten(0, (rows, width))
        q_BKNd = q_BWKGd.transpose(1, 2).flatten(2, 3)
        out_BKNd = tree_attention(q_BKNd, keys_BKCd, values_BKCd, bases_B, sees_BWW)
        return out_BKNd.unflatten(2, (width, -1)).transpose(1, 2).flatten(2, 3).flatten(0, 1)

    return attend


def _walk(choice: Choice, tree: PaddedTree, shape: PassShape) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Nodes of the accepted path among W, tokens and log-probabilities chosen there, and how many are meant."""
    rows, width, emitted = shape
    if width == 1:
        tokens_B1, device = choice.tokens_N[:, None], choice.tokens_N.device
        ones_B = torch.ones(rows, dtype=torch.int64, device=device)
        return torch.zeros_like(tokens_B1), tokens_B1, choice.logprobs_N[:, None], ones_B
    row_B1 = torch.arange(rows, device=choice.tokens_N.device)[:, None]
    parents_BU = torch.where(tree.parents_BU < 0, -1, tree.parents_BU + row_B1 * (width - 1))
    verified = spec_verify(
        _newest_first(choice.tokens_N, width),
        _newest_first(choice.logprobs_N, width),
        tree.tokens_BU.flatten(),
        parents_BU.flatten(),
        row_B1.expand(-1, width - 1).flatten(),
        num_rows=rows,
        depth=emitted - 1,
    )
    nodes_BA = verified.path.nodes_BA
    columns_BA = torch.where(nodes_BA < rows, 0, (nodes_BA - rows) % (width - 1) + 1)
    return columns_BA, verified.tokens_BA, verified.logprobs_BA, verified.path.counts_B


def _newest_first(x_T: Tensor, width: int) -> Tensor:
    """In the order of `spec_verify`: the B newest tokens, then the draft tokens of each row."""
    x_BW = x_T.unflatten(0, (-1, width))
    return torch.cat([x_BW[:, 0], x_BW[:, 1:].flatten()])


def _report(report_BP: Tensor, tokens_BA: Tensor, counts_B: Tensor, tree: PaddedTree) -> None:
    report_BP[:, : tokens_BA.shape[1]] = tokens_BA
    report_BP[:, -3] = counts_B
    report_BP[:, -2] = (tree.tokens_BU >= 0).sum(1)
    report_BP[:, -1] = tree.depths_BU.amax(1) if tree.depths_BU.shape[1] else torch.zeros_like(counts_B)
