"""The drafter's own KV cache: one slot a live row, and in front of it room for what is being drafted.

    columns of a slot:   [ draft tokens of this proposal | position 0, 1, 2, ... ]
                           U = levels x width              R = reserved columns end here

Every known position has a column of its own.  Draft tokens lie before them, at the same columns in all rows, so that a
level is written through a plain slice; the next proposal overwrites them.  Live rows are slots 0 .. B-1 and are read
through a view.  Query heads that share a key/value head are extra query rows, as in the rollout's cache.

Shapes: S slots, B live rows, C columns, K key/value heads, H query heads, G = H / K, d head size, T positions of a
catch-up pass, W positions of the row that has most, w draft tokens of a row in one level.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention.packed_attention import packed_causal_attention
from kernels.tree.tree_layout import TreeLayout, prompt_layout
from tlt_core.drafter.eagle3.model import Attend, Eagle3Config, rope_table

_PADDED_MOST = 32  # a pass whose rows catch up with more positions than this is packed, not padded


class CatchUp(NamedTuple):
    """A pass over positions start_b .. end_b - 1 of each live row, packed."""

    rows_T: Tensor  # int64
    positions_T: Tensor  # int64
    last_B: Tensor  # int64, index of each row's last position among the T
    attend: Attend
    layout: TreeLayout  # the same for `native`; places count from position 0


class DraftCache:
    """Keys and values of up to `num_slots` rows of up to `max_len` positions."""

    def __init__(
        self, config: Eagle3Config, *, num_slots: int, max_len: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        layer = config.layer
        self._reserved, self._max_len = 16, max_len
        shape = (num_slots, layer.num_kv_heads, self._reserved + max_len, layer.head_dim)
        self._keys_SKCd = torch.zeros(shape, dtype=dtype, device=device)
        self._values_SKCd = torch.zeros(shape, dtype=dtype, device=device)
        self.rope_C21d = rope_table(config, max_len, dtype=dtype, device=device)

    def from_position_0(self) -> tuple[Tensor, Tensor]:
        """Keys and values from position 0 on, [S, K, C - R, d]; drafts lie before it."""
        return self._keys_SKCd[:, :, self._reserved :], self._values_SKCd[:, :, self._reserved :]

    def clear(self) -> None:
        """Set all to zero: a mask would not stop values that are not finite."""
        self._keys_SKCd.zero_()
        self._values_SKCd.zero_()

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one slot over another."""
        columns = slice(self._reserved, self._reserved + length)
        for cache in (self._keys_SKCd, self._values_SKCd):
            cache[target, :, columns] = cache[source, :, columns]

    def catch_up(self, starts: Sequence[int], ends: Sequence[int]) -> CatchUp:
        """Attention of new known positions.  A row may have none."""
        device = self._keys_SKCd.device
        counts = [end - start for start, end in zip(starts, ends, strict=True)]
        total, most, live = sum(counts), max(counts), len(counts)
        starts_B, counts_B = torch.tensor([list(starts), counts], device=device)
        first_B = counts_B.cumsum(0) - counts_B
        rows_T = torch.arange(live, device=device).repeat_interleave(counts_B, output_size=total)
        columns_T = torch.arange(total, device=device) - first_B[rows_T]
        positions_T = starts_B[rows_T] + columns_T
        last_B = (first_B + counts_B - 1).clamp_min(0)

        def attend(q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> Tensor:
            self._keys_SKCd[rows_T, :, self._reserved + positions_T] = k_TKd
            self._values_SKCd[rows_T, :, self._reserved + positions_T] = v_TKd
            if most > _PADDED_MOST:
                return self._packed(q_THd, counts, ends)
            queries_BW = torch.minimum(first_B[:, None] + torch.arange(most, device=device), last_B[:, None])
            visible_BWC = torch.arange(max(ends), device=device) <= positions_T[queries_BW][..., None]
            num_kv, columns = k_TKd.shape[1], slice(self._reserved, self._reserved + max(ends))
            grouped = q_THd.shape[1] // num_kv
            q_BKNd = q_THd[queries_BW].unflatten(2, (num_kv, grouped)).transpose(1, 2).flatten(2, 3)
            out_BKNd = F.scaled_dot_product_attention(
                q_BKNd,
                self._keys_SKCd[:live, :, columns],
                self._values_SKCd[:live, :, columns],
                attn_mask=visible_BWC.repeat_interleave(grouped, dim=1)[:, None],
            )
            out_BWHd = out_BKNd.unflatten(2, (most, grouped)).transpose(1, 2).flatten(2, 3)
            return out_BWHd[rows_T, columns_T]

        return CatchUp(rows_T, positions_T, last_B, attend, prompt_layout(rows_T, positions_T))

    def _packed(self, q_THd: Tensor, counts: Sequence[int], ends: Sequence[int]) -> Tensor:
        """Attention of long stretches: keys gathered back to back."""
        rows = [row for row, count in enumerate(counts) if count]
        keys_TKd, values_TKd = (
            torch.cat([cache[row, :, self._reserved : self._reserved + ends[row]] for row in rows], 1).transpose(0, 1)
            for cache in (self._keys_SKCd, self._values_SKCd)
        )
        offsets = torch.tensor([0, *(counts[row] for row in rows)]).cumsum(0)
        key_offsets = torch.tensor([0, *(ends[row] for row in rows)]).cumsum(0)
        return packed_causal_attention(q_THd, keys_TKd, values_TKd, offsets, key_offsets_S1=key_offsets)

    def draft(self, ends: Sequence[int], *, levels: int, width: int) -> "DraftLevels":
        """Begin a proposal that expands `width` tokens of each row in each of `levels` levels."""
        self.reserve(levels * width)
        first, longest = self._reserved - levels * width, max(ends)
        live, columns = len(ends), slice(first, self._reserved + longest)
        ends_B = torch.tensor(list(ends), device=self._keys_SKCd.device)
        positions_BL = ends_B[:, None] + torch.arange(levels, device=ends_B.device)
        return DraftLevels(
            self._keys_SKCd[:live, :, columns],
            self._values_SKCd[:live, :, columns],
            ends_B,
            self.rope_C21d[positions_BL.clamp_max(self._max_len - 1)],  # tokens beyond are cut to their row's room
            width,
        )

    def reserve(self, count: int) -> None:
        """Make room for so many draft tokens a row; known positions keep their keys and values."""
        more = count - self._reserved
        if more > 0:
            self._keys_SKCd, self._values_SKCd = (
                F.pad(cache, (0, 0, more, 0)) for cache in (self._keys_SKCd, self._values_SKCd)
            )
            self._reserved = count


class DraftLevels:
    """The levels of one proposal: every draft token sees its row's positions, its ancestors and itself."""

    def __init__(self, keys_BKCd: Tensor, values_BKCd: Tensor, ends_B: Tensor, rope_BL21d: Tensor, width: int) -> None:
        self._keys_BKCd, self._values_BKCd, self._rope_BL21d = keys_BKCd, values_BKCd, rope_BL21d
        self._ends_B, self._width, self._num_kv, self._level = ends_B, width, keys_BKCd.shape[1], 0
        self._drafts = rope_BL21d.shape[1] * width
        self._columns_BwA = ends_B.new_empty(len(ends_B), width, 0)  # of each newest token's ancestors and itself

    def rope(self) -> Tensor:
        """Of the next level's tokens, [B * w, 2, 1, d]."""
        return self._rope_BL21d[:, self._level].repeat_interleave(self._width, dim=0)

    def attend(self, parents_Bw: Tensor) -> Attend:
        """Attention of the next level's tokens, in row order, w of each row.  parents_Bw: index of each one's parent
        among the w of the level before (of no meaning in the first level)."""
        width, first = self._width, self._level * self._width
        own = slice(first, first + width)
        columns_BwA = self._columns_BwA
        if width > 1 and self._level:
            columns_BwA = columns_BwA.gather(1, parents_Bw[..., None].expand(-1, -1, self._level))
        own_w = torch.arange(first, first + width, device=columns_BwA.device)
        self._columns_BwA = columns_BwA = torch.cat(
            [columns_BwA, own_w[:, None].expand(len(columns_BwA), -1, 1)], dim=-1
        )
        self._level += 1

        def attend(q_NHd: Tensor, k_NKd: Tensor, v_NKd: Tensor) -> Tensor:
            self._keys_BKCd[:, :, own] = k_NKd.unflatten(0, (-1, width)).transpose(1, 2)
            self._values_BKCd[:, :, own] = v_NKd.unflatten(0, (-1, width)).transpose(1, 2)
            grouped = q_NHd.shape[1] // self._num_kv
            q_BKwGd = q_NHd.view(-1, width, self._num_kv, grouped, q_NHd.shape[2]).transpose(1, 2)
            visible_BwC = self._visible(columns_BwA)
            mask_BwC = visible_BwC if width == 1 else visible_BwC.repeat_interleave(grouped, dim=1)
            out_BKMd = F.scaled_dot_product_attention(
                q_BKwGd.flatten(2, 3), self._keys_BKCd, self._values_BKCd, attn_mask=mask_BwC[:, None]
            )
            return out_BKMd.unflatten(2, (width, grouped)).transpose(1, 2).reshape(q_NHd.shape)

        return attend

    def layout(self) -> TreeLayout:
        """Of the level that `attend` began, for `native`; places count from position 0, drafts lie before it."""
        live, width, length = self._columns_BwA.shape
        rows_N = torch.arange(live, device=self._ends_B.device).repeat_interleave(width)
        paths_NA = self._columns_BwA.flatten(0, 1) - self._drafts
        lengths_N = torch.full_like(rows_N, length)
        ends_N = self._ends_B.repeat_interleave(width)
        return TreeLayout(rows_N, ends_N + (length - 1), paths_NA[:, -1], ends_N, paths_NA, lengths_N)

    def _visible(self, columns_BwA: Tensor) -> Tensor:
        known = self._keys_BKCd.shape[2] - self._drafts
        known_BC = torch.arange(known, device=self._ends_B.device) < self._ends_B[:, None]
        drafts_BwU = torch.zeros(*columns_BwA.shape[:2], self._drafts, dtype=torch.bool, device=known_BC.device)
        drafts_BwU.scatter_(2, columns_BwA, True)
        return torch.cat([drafts_BwU, known_BC[:, None].expand(-1, self._width, -1)], dim=2)
