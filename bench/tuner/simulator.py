"""A simulated engine with known costs and acceptance, on a virtual clock: its figures are exact and repeatable.

    tuner.choose -> random draws of accepted tokens, seconds with noise and spikes -> tuner.observe

The tuner sees random draws and noise.  The history holds expected tokens and seconds without noise, so that two
policies differ by their choices alone.
"""

import random
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count, pairwise
from math import prod
from typing import NamedTuple

from tlt_core.items.speculation import RoundReport, Strategy, Tuner

_POINTS = {1: 7.2e-3, 4: 7.8e-3, 9: 8.7e-3, 16: 9.8e-3, 28: 16.2e-3, 160: 90e-3}  # seconds, by tokens of a pass
_PROMPT = 100.0  # tokens of each prompt


def pass_seconds(live: int, tokens: int, context: int) -> float:
    """A 135M model on one core: measured points, attention over the context, sampling, and a constant."""
    at = min(max(bisect_right(list(_POINTS), tokens) - 1, 0), len(_POINTS) - 2)
    (low, low_s), (high, high_s) = tuple(pairwise(_POINTS.items()))[at]
    base = low_s + (high_s - low_s) * (tokens - low) / (high - low)
    return (
        0.7e-3
        + base
        + 0.03e-3 * tokens
        + 1.2e-6 * context
        + 0.25e-6 * context * (tokens / live - 1)
        + 0.3e-3 * (tokens > live)
    )


def draft_seconds(strategy: Strategy, live: int) -> float:
    """n-gram: a look-up per request; a network: one layer and a head per level."""
    if strategy.is_off:
        return 0.0
    if strategy.drafter == "ngram":
        return 0.45e-3 + 0.03e-3 * live
    return strategy.depth * (0.45e-3 + 0.3e-3 * (strategy.width > 1) + 0.02e-3 * live * strategy.width)


@dataclass
class Hits:
    first: float  # acceptance of the first draft token
    fall: float = 0.95  # factor from one position to the next
    cover: float = 1.0  # share of the rounds in which the drafter proposes
    spread: float = 0.0  # of `first` between requests: half the difference of the best and the worst


class PlayedRound(NamedTuple):
    strategy: Strategy
    tokens: float
    seconds: float
    best_rate: float  # tokens a second of the best strategy in this round; 0: not asked for


@dataclass
class Engine:
    """A request joins whenever one ends, while `waiting` lasts; each emits tokens until its length."""

    hits: dict[str, Hits]  # by drafter; may be changed between two calls of `run`
    live: int
    lengths: Callable[[random.Random], int]
    waiting: int = 0
    seed: int = 0
    noise: float = 0.03
    spikes: float = 0.02  # share of rounds that take three times as long
    compare: Iterable[Strategy] = ()  # strategies of which each round's best rate is recorded
    history: list[PlayedRound] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return sum(r.tokens for r in self.history) / sum(r.seconds for r in self.history)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._arrivals = random.Random(self.seed + 1)  # apart, so that each tuner meets the same requests
        self._ids = count()
        self.rows: dict[int, list[float]] = {}  # id -> context, tokens left, ability
        for _ in range(self.live):
            self._join()

    def _join(self) -> None:
        self.rows[next(self._ids)] = [_PROMPT, float(self.lengths(self._arrivals)), self._arrivals.uniform(-1, 1)]

    def run(self, tuner: Tuner, rounds: int = 10**9) -> None:
        for _ in range(rounds):
            if not self.rows:
                return
            self._round(tuner)

    def share(self, *strategies: Strategy, last: int) -> float:
        return sum(r.strategy in strategies for r in self.history[-last:]) / last

    def _round(self, tuner: Tuner) -> None:
        rows, live = list(self.rows), len(self.rows)
        context = int(sum(row[0] for row in self.rows.values()))
        strategy = tuner.choose(rows, context)
        offered, drafted, accepted = zip(*(self._draft(strategy, row[2]) for row in self.rows.values()), strict=True)
        shake = self._random.gauss(1.0, self.noise) * (3.0 if self._random.random() < self.spikes else 1.0)
        verify_s, draft_s = pass_seconds(live, live + sum(drafted), context), draft_seconds(strategy, live)
        best = max((self._rate_of(other, context) for other in self.compare), default=0.0)
        self.history.append(PlayedRound(strategy, live + self._expected(strategy), verify_s + draft_s, best))
        tuner.observe(
            rows, RoundReport(strategy, live, context, drafted, offered, accepted, draft_s * shake, verify_s * shake)
        )
        for key, new in zip(rows, accepted, strict=True):
            row = self.rows[key]
            row[0] += new + 1
            row[1] -= new + 1
            if row[1] <= 0:
                del self.rows[key]
                tuner.forget(key)
                if self.waiting:
                    self.waiting -= 1
                    self._join()

    def _draft(self, strategy: Strategy, ability: float) -> tuple[int, int, int]:
        """Depth, draft tokens and accepted ones of one request."""
        hits = self.hits.get(strategy.drafter)
        if strategy.is_off or hits is None or self._random.random() >= hits.cover:
            return 0, 0, 0
        rates = _rates(hits, strategy, ability)
        accepted = next((step for step, rate in enumerate(rates) if self._random.random() >= rate), len(rates))
        return len(rates), _asked(strategy), accepted

    def _expected(self, strategy: Strategy) -> float:
        """Draft tokens accepted on average, all requests together."""
        hits = self.hits.get(strategy.drafter)
        if strategy.is_off or hits is None:
            return 0.0
        total = 0.0
        for _, _, ability in self.rows.values():
            rates = _rates(hits, strategy, ability)
            total += hits.cover * sum(prod(rates[: step + 1]) for step in range(len(rates)))
        return total

    def _rate_of(self, strategy: Strategy, context: int) -> float:
        """Expected tokens a second if this round used the strategy."""
        live, hits = len(self.rows), self.hits.get(strategy.drafter)
        drafted = 0.0 if strategy.is_off or hits is None else live * hits.cover * _asked(strategy)
        seconds = pass_seconds(live, live + round(drafted), context) + draft_seconds(strategy, live)
        return (live + self._expected(strategy)) / seconds


def _asked(strategy: Strategy) -> int:
    return min(strategy.depth, strategy.tokens) if strategy.width == 1 else strategy.tokens


def _rates(hits: Hits, strategy: Strategy, ability: float) -> list[float]:
    """Acceptance of each position, given that the one before was accepted."""
    breadth = 1.0 if strategy.width == 1 else (strategy.width * strategy.tokens / strategy.depth) ** 0.5
    first = min(max(hits.first + hits.spread * ability, 0.0), 0.98)
    depth = min(strategy.depth, strategy.tokens)
    return [1 - (1 - first * hits.fall**step) ** breadth**0.6 for step in range(depth)]
