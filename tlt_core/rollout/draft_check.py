"""Guard between a drafter and the target: a proposal that breaks the contract of `DraftTree` is not used.

A drafter that fails or breaks the contract costs its round's speculation, never a token.  The round is made plainly,
the failure is counted and logged, and the tuner sees a strategy that offers nothing.
"""

import logging
from collections import Counter
from collections.abc import Mapping

import torch

from tlt_core.items.speculation import Drafter, DraftTree, LiveView, Strategy

log = logging.getLogger(__name__)


class DraftError(ValueError):
    """A proposal that breaks the contract."""


class GuardedDrafting:
    """Asks an engine's drafters, and counts their failures by (drafter, kind of failure)."""

    def __init__(self, drafters: Mapping[str, Drafter], *, vocab_size: int) -> None:
        self.drafters, self._vocab_size = drafters, vocab_size
        self.failures: Counter[tuple[str, str]] = Counter()

    def propose(self, view: LiveView, strategy: Strategy) -> DraftTree:
        """The tree of the strategy's drafter, checked; an empty one when the drafter fails."""
        drafter = self.drafters[strategy.drafter]
        try:
            tree = drafter.propose(view, strategy)
            check_tree(tree, view, strategy, vocab_size=self._vocab_size)
        except Exception as error:  # whatever a drafter raises must not end the rollout
            kind = type(error).__name__
            self.failures[drafter.name, kind] += 1
            if self.failures[drafter.name, kind] == 1:
                log.warning("drafter %r failed, rounds with it are made plainly", drafter.name, exc_info=True)
            return DraftTree.empty()
        return tree


def check_tree(tree: DraftTree, view: LiveView, strategy: Strategy, *, vocab_size: int) -> None:
    """Raises DraftError when the tree breaks the contract of `DraftTree` or exceeds what was asked for."""
    num_nodes, num_rows = len(tree.tokens_N), len(view.lengths)
    if any(x.dtype != torch.int64 or x.shape != (num_nodes,) for x in tree):
        raise DraftError(f"draft arrays must be int64 of one length, not {[(x.dtype, tuple(x.shape)) for x in tree]}")
    if not num_nodes:
        return
    device = tree.tokens_N.device
    room_B = torch.tensor(view.room, device=device)
    own_N = torch.arange(num_nodes, device=device)
    rows_N = tree.rows_N.clamp(0, num_rows - 1)
    parents_N = tree.parents_N.clamp(0, num_nodes - 1)
    has_parent_N = tree.parents_N >= 0
    problems = {
        "token outside the vocabulary": (tree.tokens_N < 0) | (tree.tokens_N >= vocab_size),
        "row that is not live": rows_N != tree.rows_N,
        "rows out of order": torch.cat([rows_N[:1], rows_N[:-1]]) > rows_N,
        "parent after its child": tree.parents_N >= own_N,
        "parent below -1": tree.parents_N < -1,
        "parent in another row": has_parent_N & (rows_N[parents_N] != rows_N),
        "depth that is not its parent's plus one": tree.depths_N
        != torch.where(has_parent_N, tree.depths_N[parents_N], 0) + 1,
        "deeper than asked for": tree.depths_N > strategy.depth,
        "deeper than the row has room for": tree.depths_N >= room_B[rows_N],
        "more tokens than asked for": rows_N.bincount(minlength=num_rows)[rows_N] > strategy.tokens,
    }
    broken_KN = torch.stack(list(problems.values()))
    if bool(broken_KN.any()):
        names = [name for name, broken in zip(problems, broken_KN.any(1).tolist(), strict=True) if broken]
        raise DraftError(f"invalid draft tree: {'; '.join(names)}")
