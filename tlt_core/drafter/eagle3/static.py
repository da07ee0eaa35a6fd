"""EAGLE-3's rounds of fixed shape, for graphs: catching up and drafting without the host.

    begin      host: where to start each row's catch-up         (a long backlog is run packed, outside the graphs)
    catch_up   X positions of each row -> y of its last one     graph "extend", one for each number of rows
    draft      y -> levels of children -> PaddedTree            graph "draft", one for each strategy

Both use attention with lengths on the device (`kernels/tree/tree_attention`).  Draft tokens lie behind a row's known
positions, where the next catch-up writes before it reads.  So the cache is longer than a row by the largest draft.  A
catch-up also runs places behind a row's last position.  Their keys fall into the same room, and nobody sees them.

Shapes: B rows, X positions of a catch-up, w nodes that a level expands, U nodes expanded in all, J draft vocabulary,
D hidden size, S slots, C positions, E tapped width, K key/value heads, d head size.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kernels.sampling.coupled_sample import gumbel_noise
from kernels.tree.tree_attention import attend_in_slots
from tlt_core.drafter.eagle3.cache import DraftCache
from tlt_core.drafter.eagle3.model import Attend, Eagle3Model
from tlt_core.drafter.eagle3.tree import StaticTreeBuilder, perturbed_scores
from tlt_core.items.hidden_states import HiddenStates
from tlt_core.items.speculation import LiveView, Strategy
from tlt_core.items.static_shapes import Inputs, PaddedTree
from tlt_core.items.types import SamplingParams
from tlt_core.model.sampling import row_keys

CatchUp = Callable[[LiveView], object]


class DraftParts(NamedTuple):
    """What an `Eagle3Drafter` works with; only the memory of the hidden states may move, while there are no graphs."""

    net: Eagle3Model
    embedding: nn.Module
    cache: DraftCache
    hidden: HiddenStates
    noise_ids_J: Tensor  # int32
    error_scale: float


def room_for(strategies: Sequence[Strategy]) -> int:
    """Places behind a row's longest text that drafting needs."""
    drafted = max((s.width * (s.depth - 1) for s in strategies), default=0)
    return max(drafted, _positions_at_once(strategies))


class StaticEagle3:
    """Implements `static_shapes.StaticDrafting` beside a drafter, whose weights, cache and hidden states it uses."""

    def __init__(
        self,
        parts: DraftParts,
        inputs: Inputs,
        strategies: Sequence[Strategy],
        *,
        done: list[int],
        catch_up: CatchUp,
    ) -> None:
        """done: the drafter's own list of how many positions of each row are in its cache.  catch_up: the drafter's
        packed catch-up."""
        self._parts, self._inputs, self._done, self._catch_up = parts, inputs, done, catch_up
        self._width = _positions_at_once(strategies)
        self._keys_SKCd, self._values_SKCd = parts.cache.from_position_0()
        device, most = self._keys_SKCd.device, len(self._keys_SKCd)
        needed = inputs.max_len + room_for(strategies)
        if self._keys_SKCd.shape[2] < needed:
            raise ValueError(
                f"the EAGLE-3 drafter has {self._keys_SKCd.shape[2]} positions a row, and texts of {inputs.max_len} "
                f"tokens with drafts of fixed shape need {needed}: make it with room={room_for(strategies)}"
            )
        self._starts_B = torch.zeros(most, dtype=torch.int64, device=device)
        self._starts_host_B = torch.zeros(most, dtype=torch.int64, pin_memory=device.type == "cuda")
        size = parts.net.config.layer.hidden_size
        self._y_BD = torch.zeros(most, size, dtype=self._keys_SKCd.dtype, device=device)

    def begin(self, view: LiveView) -> None:
        """See `StaticDrafting`.  Rows that are too far behind for a graph are caught up here."""
        ends = [length - 1 for length in view.lengths]
        if any(end - done > self._width for done, end in zip(self._done, ends, strict=False)):
            self._catch_up(view)
        starts = [max(0, min(done, end - 1)) for done, end in zip(self._done, ends, strict=False)]
        self._starts_host_B.zero_()
        self._starts_host_B[: len(starts)] = torch.tensor(starts)
        self._starts_B.copy_(self._starts_host_B, non_blocking=True)

    def end(self, lengths: Sequence[int]) -> None:
        """See `StaticDrafting`."""
        self._done[: len(lengths)] = [length - 1 for length in lengths]

    @torch.inference_mode()
    def catch_up(self, rows: int) -> None:
        """See `StaticDrafting`."""
        parts, width = self._parts, self._width
        starts_B, ends_B = self._starts_B[:rows], self._inputs.lengths_B[:rows] - 1
        columns_X = torch.arange(width, device=starts_B.device)
        positions_BX = starts_B[:, None] + columns_X
        tokens_BX = self._inputs.tokens_BC[:rows].gather(1, positions_BX + 1)
        taps_BXE = parts.hidden.taps_SCE[parts.hidden.slots_B[:rows, None], positions_BX]
        sees_BXX = (columns_X <= columns_X[:, None]).expand(rows, -1, -1)
        y_TD = parts.net(
            parts.embedding(tokens_BX.flatten()),
            parts.net.fuse(taps_BXE.flatten(0, 1)),
            parts.cache.rope_C21d[positions_BX.flatten()],
            self._attend(starts_B, positions_BX, sees_BXX),
        )
        last_B = (ends_B - 1 - starts_B).clamp(0, width - 1)
        self._y_BD[:rows] = y_TD.unflatten(0, (rows, width))[torch.arange(rows, device=last_B.device), last_B]

    @torch.inference_mode()
    def draft(self, rows: int, strategy: Strategy, params: SamplingParams, tree: PaddedTree) -> None:
        """See `StaticDrafting`."""
        parts, inputs = self._parts, self._inputs
        depth = min(strategy.depth, strategy.tokens)
        width = min(strategy.width, strategy.tokens, len(parts.noise_ids_J))
        lengths_B = inputs.lengths_B[:rows]
        ends_B = lengths_B - 1
        builder = StaticTreeBuilder(rows, width=width, error_scale=parts.error_scale)
        noise_BLJ = self._noise(rows, depth, params)
        levels = _Levels(rows, width, depth - 1, device=ends_B.device)
        y_ND = self._y_BD[:rows]
        for level in range(depth):
            noise_BJ = None if noise_BLJ is None else noise_BLJ[:, level]
            columns_BM = builder.add_level(perturbed_scores(parts.net.logits(y_ND), noise_BJ, params))
            if level + 1 == depth:
                break
            beam_Bw = builder.choose_beam()
            parents_Bw = beam_Bw // width
            if level:
                index_BwD = parents_Bw[..., None].expand(-1, -1, y_ND.shape[1])
                y_ND = y_ND.unflatten(0, (rows, -1)).gather(1, index_BwD).flatten(0, 1)
            else:
                y_ND = y_ND.repeat_interleave(width, dim=0)
            tokens_Bw = parts.net.draft_ids_J[columns_BM.gather(1, beam_Bw)]
            places_Bw = ends_B[:, None] + level * width + levels.own_w
            rope = parts.cache.rope_C21d[(ends_B + level).repeat_interleave(width)]
            attend = self._attend(ends_B, places_Bw, levels.expand(parents_Bw))
            y_ND = parts.net(parts.embedding(tokens_Bw.flatten()), y_ND, rope, attend)
        limits_B = torch.where(lengths_B > 1, inputs.room_B[:rows] - 1, 0)  # a row of one token has no position to run
        tree.copy_(
            builder.finish_padded(
                parts.net.draft_ids_J,
                limits_B.clamp_max(depth),
                inputs.log_min_prob,
                tokens=strategy.tokens,
                width=tree.tokens_BU.shape[1] + 1,
            )
        )

    def _noise(self, rows: int, depth: int, params: SamplingParams) -> Tensor | None:
        """The target's, at the next positions of every row on the draft vocabulary, [B, depth, J]."""
        if params.temperature == 0:
            return None
        inputs = self._inputs
        positions_BL = inputs.lengths_B[:rows, None] + torch.arange(depth, device=inputs.lengths_B.device)
        keys_BL2 = row_keys(inputs.streams_B[:rows, None], positions_BL)
        return gumbel_noise(keys_BL2.flatten(0, 1), self._parts.noise_ids_J).unflatten(0, (-1, depth))

    def _attend(self, bases_B: Tensor, places_BW: Tensor, sees_BWU: Tensor) -> Attend:
        rows = len(places_BW)
        return partial(
            attend_in_slots,
            keys_BKCd=self._keys_SKCd[:rows],
            values_BKCd=self._values_SKCd[:rows],
            rows_B1=torch.arange(rows, device=bases_B.device)[:, None],
            places_BW=places_BW,
            bases_B=bases_B,
            sees_BWU=sees_BWU,
        )


class _Levels:
    """Who sees whom among the expanded nodes: a node sees itself and its ancestors."""

    def __init__(self, rows: int, width: int, levels: int, *, device: torch.device) -> None:
        self.own_w = torch.arange(width, device=device)
        self._nodes_U = torch.arange(max(1, levels * width), device=device)
        self._sees_BwU = torch.zeros(rows, width, len(self._nodes_U), dtype=torch.bool, device=device)
        self._level = 0

    def expand(self, parents_Bw: Tensor) -> Tensor:
        """sees_BwU of the next level.  parents_Bw: index of each node's parent among the w of the level before (of no
        meaning in the first)."""
        above_BwU = self._sees_BwU.gather(1, parents_Bw[..., None].expand(-1, -1, len(self._nodes_U)))
        own_w = self.own_w + self._level * len(self.own_w)
        self._sees_BwU = above_BwU | (own_w[:, None] == self._nodes_U)
        self._level += 1
        return self._sees_BwU


def _positions_at_once(strategies: Sequence[Strategy]) -> int:
    """X: the most tokens that a round emits.  A drafter that speculated in the last round is at most so far behind."""
    return 1 + max((s.depth for s in strategies), default=0)
