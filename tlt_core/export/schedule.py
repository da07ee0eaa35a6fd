"""How long a chain to draft at which batch size: vLLM's `num_speculative_tokens_per_batch_size`.

    rate(B, K) = B (1 + s_1 + .. + s_K) / seconds(B, K)        s_j: share of the drafts that are accepted to position j

K(B) is the shortest chain whose rate is within 2 % of the best: a draft token that brings less is not worth the risk
that the serving machine's costs are not these.  K = 0 decodes plainly.  Equal neighbours become one range; ranges begin
at 1, leave no gap, and vLLM uses the last one for all larger batches.

Shapes: B batch sizes 1 .. B, K chain lengths 0 .. K.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

_WITHIN = 0.98


class DepthRange(NamedTuple):
    """DepthRange(first=1, last=8, depth=3): three draft tokens while 1 to 8 requests are decoded."""

    first: int
    last: int
    depth: int


def expected_rates(survival: Sequence[float], seconds_BK: Sequence[Sequence[float]]) -> list[list[float]]:
    """Tokens a second for each batch size and chain length.

    survival: s_1 .. s_K; seconds_BK: of a round, entry [b - 1][k].  Raises ValueError where the two do not fit.
    """
    emitted = [1.0]
    for share in survival:
        emitted.append(emitted[-1] + share)
    rates = []
    for live, seconds_K in enumerate(seconds_BK, start=1):
        if len(seconds_K) != len(emitted) or min(seconds_K) <= 0:
            raise ValueError(
                f"costs {list(seconds_K)} at batch size {live}: one positive number of seconds is needed for each "
                f"chain length from 0 to {len(survival)}"
            )
        rates.append([live * tokens / seconds for tokens, seconds in zip(emitted, seconds_K, strict=True)])
    return rates


def depth_table(rates_BK: Sequence[Sequence[float]]) -> list[DepthRange]:
    """The table, from `expected_rates`."""
    depths = [next(k for k, rate in enumerate(row) if rate >= _WITHIN * max(row)) for row in rates_BK]
    table = []
    for depth, group in groupby(enumerate(depths, start=1), key=lambda item: item[1]):
        sizes = [size for size, _ in group]
        table.append(DepthRange(sizes[0], sizes[-1], depth))
    return table
