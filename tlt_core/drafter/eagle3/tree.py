"""Which tokens a proposal holds: children by the target's own noise, trees by estimated hit rate.

Children of a node, for the token at position p of its row: the drafter's best by

    s_v = log q_v / T + g_v(p),     g: the noise with which the target will choose there (T = 0: by log q alone)

so a drafter that knows the target's distribution always ranks the target's own choice first.

A tree keeps the nodes that verification is most likely to enter.  q_v says little about that: the noise is known, so
the first child is far more likely to be right than its q.  What is not known is the drafter's error.  Let the target's
perturbed scores be the drafter's plus independent Gumbel errors of scale c.  Then by the Gumbel-max theorem the target
chooses v with probability

    hit(v) = softmax(s / c)_v        (T = 0 and c = 1: EAGLE-2's own criterion, the draft probability)

It ranks children as s does, and is confident where the leader is far ahead.  A node's value is the sum of log hit over
its path; it falls along a path, so a kept node's parent is kept, too.  c is a property of the drafter.  The sampled
tokens do not depend on it, only how many guesses are right.

Where each verified token costs time (a CPU, a large batch), nodes whose value is below the tuner's least are left out,
so each row's draft is as long as it is likely to be right.  Drafting ends with the level that promises less than
another one costs (`MinDraftProbs`).

Shapes: B rows, b nodes of a row that are expanded, w children of a node, M candidates of a row, N kept nodes of all
rows, J draft vocabulary.
"""

import math

import torch
from torch import Tensor

from kernels.tree.draft_children import Children, best_children
from tlt_core.items.speculation import NO_MIN_DRAFT_PROBS, DraftTree, LiveView, MinDraftProbs
from tlt_core.items.static_shapes import PaddedTree
from tlt_core.items.types import SamplingParams
from tlt_core.model.sampling import policy_scores, row_keys


def draft_keys(view: LiveView, lengths_B: Tensor, *, depth: int) -> Tensor:
    """Keys of the target's noise at the next `depth` positions of every row, [B, depth, 2] int32."""
    positions_BL = lengths_B[:, None] + torch.arange(depth, device=lengths_B.device)
    return row_keys(view.streams_B[: len(lengths_B), None], positions_BL)


def perturbed_scores(logits_NJ: Tensor, noise_BJ: Tensor | None, params: SamplingParams) -> Tensor:
    """s of the module docstring (up to a constant for each node), [B, b, J] float32, for N = B b nodes in row order."""
    if noise_BJ is None:
        return policy_scores(logits_NJ, params)[:, None]
    return policy_scores(logits_NJ, params).unflatten(0, (len(noise_BJ), -1)) + noise_BJ[:, None]


class TreeBuilder:
    """Grows the candidates of a proposal level by level; width 1 makes chains."""

    def __init__(
        self, rows: int, *, width: int, error_scale: float, min_draft_probs: MinDraftProbs = NO_MIN_DRAFT_PROBS
    ) -> None:
        self._rows, self.width, self._scale = rows, width, error_scale
        self._log_min_prob = math.log(min_draft_probs.token) if min_draft_probs.token > 0 else None
        self._min_level_sum = min_draft_probs.level
        self._tokens: list[Tensor] = []  # [B, .] each, as are the next two
        self._depths: list[Tensor] = []  # of their columns
        self._parents: list[Tensor] = []
        self._values: list[Tensor] = []
        self._count = 0
        self._beam_Bb: Tensor | None = None  # candidates that are being expanded; None: the newest tokens

    def add_level(self, scores_BbJ: Tensor) -> Tensor:
        """Add the children of the expanded nodes (at first: of the newest tokens).  Returns their columns in J,
        [B, b w]."""
        scores_NJ = scores_BbJ.reshape(-1, scores_BbJ.shape[-1])
        return self.add_children(best_children(scores_NJ, width=self.width, error_scale=self._scale))

    def add_children(self, children: Children) -> Tensor:
        """Add children that were chosen elsewhere, of N = B b nodes in row order; returns as `add_level`."""
        columns_BM = children.columns_Nw.view(self._rows, -1)
        values_Bbw = children.values_Nw.view(self._rows, -1, self.width)
        if self._beam_Bb is not None:
            values_Bbw = values_Bbw + self._all(self._values).gather(1, self._beam_Bb)[..., None]
        self._values.append(values_Bbw.flatten(1))
        above = columns_BM.new_full((self._rows, 1), -1) if self._beam_Bb is None else self._beam_Bb
        self._parents.append(above.repeat_interleave(self.width, dim=1))
        self._depths.append(above.new_full(columns_BM.shape[1:], len(self._tokens) + 1))
        self._tokens.append(columns_BM)
        return columns_BM

    def add_chain(self, columns_BL: Tensor, values_BL: Tensor) -> None:
        """Add all levels of a chain at once.  values_BL: of each node."""
        levels_L = torch.arange(columns_BL.shape[1], device=columns_BL.device)
        self._parents.append((levels_L - 1).expand_as(columns_BL))
        self._depths.append(levels_L + 1)
        self._tokens.append(columns_BL)
        self._values.append(values_BL)

    def is_hopeless(self) -> bool:
        """Whether another level is not worth drafting: it cannot promise more than the newest one, which promises too
        little.  Waits for the device, if there is a least."""
        if self._log_min_prob is None:
            return False
        promising_BM = torch.where(self._values[-1] < self._log_min_prob, -torch.inf, self._values[-1])
        return float(promising_BM.exp().sum()) <= self._min_level_sum

    def choose_beam(self) -> Tensor:
        """Pick the nodes of the newest level to expand next; returns their index in it, [B, w]."""
        picked_Bw = self._values[-1].topk(self.width, dim=1).indices
        self._beam_Bb = picked_Bw + self._count
        self._count += self._tokens[-1].shape[1]
        return picked_Bw

    def finish(self, draft_ids_J: Tensor, limits_B: Tensor, *, tokens: int) -> DraftTree:
        """The best `tokens` candidates of each row, none deeper than the row's limit."""
        depths_M = torch.cat(self._depths)
        values_BM = self._all(self._values)
        keep_BM = (depths_M <= limits_B[:, None]) & values_BM.isfinite()  # not of tokens that top-k or top-p excludes
        if self._log_min_prob is not None:  # a parent's value is at least its child's
            keep_BM &= values_BM >= self._log_min_prob
        values_BM = values_BM.masked_fill(~keep_BM, -torch.inf)
        # Stable: where a child's value rounds to its parent's, the parent comes first.
        best = values_BM.sort(dim=1, descending=True, stable=True).indices[:, :tokens]
        keep_BM &= torch.zeros_like(keep_BM).scatter_(1, best, True)
        rows_N, columns_N = keep_BM.nonzero(as_tuple=True)
        parents_N = self._all(self._parents)[rows_N, columns_N]
        packed_BM = keep_BM.flatten().cumsum(0).view_as(keep_BM) - 1
        return DraftTree(
            tokens_N=draft_ids_J[self._all(self._tokens)[rows_N, columns_N]],
            parents_N=torch.where(parents_N < 0, -1, packed_BM[rows_N, parents_N.clamp_min(0)]),
            rows_N=rows_N,
            depths_N=depths_M[columns_N],
        )

    def _all(self, levels: list[Tensor]) -> Tensor:
        return torch.cat(levels, dim=1)


class StaticTreeBuilder(TreeBuilder):
    """The same tree in fixed shapes.  The least is on the device, and nothing waits, so a graph can hold it."""

    def finish_padded(
        self, draft_ids_J: Tensor, limits_B: Tensor, log_min_prob: Tensor, *, tokens: int, width: int
    ) -> PaddedTree:
        """As `finish`, for a width of W > tokens.  log_min_prob: [], of `MinDraftProbs.token`."""
        columns_BM, parents_BM, values_BM = (self._all(x) for x in (self._tokens, self._parents, self._values))
        depths_M = torch.cat(self._depths)
        keep_BM = (depths_M <= limits_B[:, None]) & (values_BM >= log_min_prob) & values_BM.isfinite()
        ranked_BM = values_BM.masked_fill(~keep_BM, -torch.inf)
        # Stable: where a child's value rounds to its parent's, the parent comes first.  Then back in tree order.
        best_Bn = ranked_BM.sort(dim=1, descending=True, stable=True).indices[:, :tokens].sort(dim=1).values
        count = best_Bn.shape[1]
        places_Bn = torch.arange(count, device=limits_B.device).expand(len(best_Bn), -1)
        place_BM = torch.zeros_like(columns_BM).scatter_(1, best_Bn, places_Bn)
        kept_Bn, parents_Bn = keep_BM.gather(1, best_Bn), parents_BM.gather(1, best_Bn)
        tree = PaddedTree.empty(self._rows, width, device=limits_B.device)
        tokens_Bn = draft_ids_J[columns_BM.gather(1, best_Bn)]
        tree.tokens_BU[:, :count] = torch.where(kept_Bn, tokens_Bn, -1)
        parents_Bn = torch.where(parents_Bn < 0, -1, place_BM.gather(1, parents_Bn.clamp_min(0)))
        tree.parents_BU[:, :count] = torch.where(kept_Bn, parents_Bn, -1)
        tree.depths_BU[:, :count] = torch.where(kept_Bn, depths_M[best_Bn], 0)
        return tree
