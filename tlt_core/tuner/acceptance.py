"""How many draft tokens the live requests will accept.

    E[accepted] = h_1 + h_1 h_2 + ..          h_j = P(token j is accepted | j - 1 were); no token j counts as a miss

Every h_j is a moving average over all requests, one for each drafter, tree shape and position; chains of all lengths
share theirs.  Requests differ: each has a factor on the odds h / (1 - h), learnt from its own drafts and shrunk to 1.

The optimistic estimate fills in what is unknown, or was seen long ago, with an acceptance of 0.9.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tlt_core.items.speculation import RoundReport, Strategy

_FIRST_GUESS = 0.5  # acceptance of a drafter that was never tried; a few drafts replace it
_FIRST_WEIGHT = 2.0  # trials that this guess is worth
_NEIGHBOUR_WEIGHT = 12.0  # trials that the estimate of position j - 1 is worth as a guess for position j
_MOST_WEIGHT = 100.0  # trials remembered: the standard deviation of a share is then 0.05 at most
_FRESH_ROUNDS = 8  # without a trial, until evidence begins to age
_MEMORY_ROUNDS = 20.0  # in which it then falls to 1 / e: a few drafts outweigh the past of an unused drafter
_HOPE = 0.9  # acceptance of a very good drafter
_HOPE_WEIGHT = 4.0  # trials that hope is worth: four failures leave half of it
_REQUEST_DECAY = 0.97  # per trial: a request's latest 33 trials count, for its text changes
_REQUEST_WEIGHT = 10.0  # trials that the average of all requests is worth to one of them
KNOWN_AFTER = 4  # drafts of a shape, before a strategy is chosen by its estimate: a useless drafter shows by then
_WEIGHT_AFTER_CHANGE = 5.0  # trials that old evidence is worth when the drafter may be a different one
_LARGE_CHANGE = 0.2  # standard deviation of a share of so few trials: a smaller change discounts less
_REQUEST_AFTER_CHANGE = 0.05  # share of a request's evidence that is kept then


class Expected(NamedTuple):
    """What one strategy would do in the next round, all requests together."""

    accepted: float  # draft tokens
    drafted: float  # draft tokens verified


class _Share:
    """A moving share of successes."""

    __slots__ = ("mean", "round", "seen", "weight")

    def __init__(self, mean: float) -> None:
        self.mean, self.weight, self.seen, self.round = mean, 0.0, 0, 0

    def add(self, hits: float, trials: int, now: int) -> None:
        """The trials of round `now`."""
        self.seen += trials
        self.weight = min(self.weight_at(now) + trials, max(_MOST_WEIGHT, trials))
        self.mean += (hits - trials * self.mean) / self.weight
        self.round = now

    def weight_at(self, now: int) -> float:
        """Trials that the mean is worth in round `now`."""
        return self.weight * _kept(now - self.round)

    def state(self) -> list[float]:
        """As JSON values."""
        return [self.mean, self.weight, self.seen, self.round]

    def restore(self, state: Sequence[Any]) -> None:
        """Go on from `state`."""
        self.mean, self.weight, self.seen, self.round = state


class _Request:
    """How one request takes one drafter's tokens: decayed trials, hits, and the hits that an average one would have."""

    __slots__ = ("expected", "hits", "round", "trials")

    def __init__(self, trials: float = 0.0, hits: float = 0.0, expected: float = 0.0, round: int = 0) -> None:
        self.trials, self.hits, self.expected, self.round = trials, hits, expected, round

    def add(self, hit: bool, expected: float) -> None:
        """One trial; expected: the average request's chance of success."""
        self.fade(_REQUEST_DECAY)
        self.trials, self.hits, self.expected = self.trials + 1.0, self.hits + hit, self.expected + expected

    def fade(self, factor: float) -> None:
        """Let what is known weigh less."""
        self.trials, self.hits, self.expected = self.trials * factor, self.hits * factor, self.expected * factor

    def factor_at(self, now: int) -> float:
        """On the odds of each position, in round `now`."""
        average, kept = self.expected / self.trials, _kept(now - self.round)
        own = (kept * self.hits + _REQUEST_WEIGHT * average) / (kept * self.trials + _REQUEST_WEIGHT)
        return own / (1.0 - own) * (1.0 - average) / average


class Acceptance:
    """Estimates for strategies (without OFF)."""

    def __init__(self, strategies: Sequence[Strategy]) -> None:
        self._strategies = tuple(strategies)
        self._shares: dict[str, list[_Share]] = {}  # by shape, then position
        for s in self._strategies:
            shares = self._shares.setdefault(shape_of(s), [])
            shares += [_Share(_FIRST_GUESS) for _ in range(_depth(s) - len(shares))]
        self._filled = {s: _Share(1.0) for s in self._strategies}  # drafted tokens over those asked for
        self._requests: dict[str, dict[int, _Request]] = {
            s.drafter: {} for s in self._strategies
        }  # by drafter, then row
        self._round = 0

    def known(self, strategy: Strategy) -> bool:
        """Whether enough drafts of this shape were tried.  OFF needs none."""
        return strategy.is_off or self._shares[shape_of(strategy)][0].seen >= KNOWN_AFTER

    def expected(self, rows: Sequence[int], *, optimistic: bool = False) -> dict[Strategy, Expected]:
        """What each strategy would do in a round of these requests."""
        survivors: dict[str, list[float]] = {}
        for strategy in self._strategies:
            shape = shape_of(strategy)
            if shape not in survivors:
                means = self._means(self._shares[shape], optimistic)
                survivors[shape] = self._survivors(means, strategy.drafter, rows)
        result = {}
        for s in self._strategies:
            filled = self._filled[s]
            share = self._hoped(filled.mean, filled) if optimistic else filled.mean
            accepted = sum(survivors[shape_of(s)][: _depth(s)])
            result[s] = Expected(accepted, len(rows) * share * _asked(s))
        return result

    def observe(self, rows: Sequence[int], report: RoundReport) -> None:
        """Learn from a round."""
        self._round += 1
        strategy = report.strategy
        if strategy not in self._filled:
            return
        shares, depth = self._shares[shape_of(strategy)], _depth(strategy)
        means, requests = self._means(shares, False), self._requests[strategy.drafter]
        trials, hits = [0] * depth, [0] * depth
        for row, accepted in zip(rows, report.accepted, strict=True):
            request = requests.setdefault(row, _Request())
            request.fade(_kept(self._round - request.round))
            request.round = self._round
            for j in range(min(accepted + 1, depth)):
                request.add(j < accepted, means[j])
                trials[j] += 1
                hits[j] += j < accepted
        for share, hit, trial in zip(shares, hits, trials, strict=False):
            if trial:
                share.add(hit, trial, self._round)
        self._filled[strategy].add(sum(report.drafted) / _asked(strategy), len(rows), self._round)

    def forget(self, row: int) -> None:
        """A request has ended."""
        for requests in self._requests.values():
            requests.pop(row, None)

    def discount(self, drafter: str | None, *, change: float = math.inf) -> None:
        """A drafter (None: any) has changed: means stay, but old evidence weighs less.

        change: the share by which its acceptance may differ.  The weight is cut to as many trials as would leave a
        doubt of that size, so a small change costs nothing, and a repeated call changes nothing more.
        """
        most = _WEIGHT_AFTER_CHANGE * max(_LARGE_CHANGE / max(change, 1e-9), 1.0) ** 2
        kept = min(max(most / _MOST_WEIGHT, _REQUEST_AFTER_CHANGE), 1.0)
        for shape, shares in self._shares.items():
            if drafter in (None, _drafter_of(shape)):
                for share in shares:
                    share.weight = min(share.weight, most)
        for name, requests in self._requests.items():
            if drafter in (None, name):
                for request in requests.values():
                    request.fade(kept)

    def state_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "round": self._round,
            "shares": {shape: [share.state() for share in shares] for shape, shares in self._shares.items()},
            "filled": {str(s): share.state() for s, share in self._filled.items()},
            "requests": {
                name: {str(row): [r.trials, r.hits, r.expected, r.round] for row, r in requests.items()}
                for name, requests in self._requests.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Shapes and drafters that are not among the strategies are dropped."""
        self._round = state["round"]
        for shape, shares in self._shares.items():
            for share, saved in zip(shares, state["shares"].get(shape, ()), strict=False):
                share.restore(saved)
        for s, filled in self._filled.items():
            filled.restore(state["filled"].get(str(s), filled.state()))
        for name in self._requests:
            saved_requests = state["requests"].get(name, {})
            self._requests[name] = {int(row): _Request(*saved) for row, saved in saved_requests.items()}

    def _survivors(self, means: Sequence[float], drafter: str, rows: Sequence[int]) -> list[float]:
        """Requests that accept at least 1, 2, .. tokens."""
        requests = self._requests[drafter]
        factors = [requests[row].factor_at(self._round) for row in rows if row in requests]
        totals = [0.0] * len(means)
        for factor, count in ((1.0, len(rows) - len(factors)), *((factor, 1) for factor in factors)):
            alive = float(count)
            for j, mean in enumerate(means):
                odds = factor * mean / (1.0 - mean)
                alive *= odds / (1.0 + odds)
                totals[j] += alive
        return totals

    def _means(self, shares: Sequence[_Share], optimistic: bool) -> list[float]:
        means: list[float] = []
        for share in shares:
            weight, guess, worth = float(share.seen), _FIRST_GUESS, _FIRST_WEIGHT
            if means:  # old evidence is replaced by that of the position before, so that a longer draft is tried again
                weight, guess, worth = share.seen * _kept(self._round - share.round), means[-1], _NEIGHBOUR_WEIGHT
            means.append((weight * share.mean + worth * guess) / (weight + worth))
        if optimistic:
            means = [self._hoped(mean, share) for mean, share in zip(means, shares, strict=True)]
        return [min(max(mean, 0.005), 0.98) for mean in means]

    def _hoped(self, mean: float, share: _Share) -> float:
        return mean + max(_HOPE - mean, 0.0) * _HOPE_WEIGHT / (share.weight_at(self._round) + _HOPE_WEIGHT)


def shape_of(strategy: Strategy) -> str:
    """Name of what shares its acceptance: "off", the chains of a drafter, or one of its trees."""
    return f"{strategy.drafter}:chain" if strategy.width == 1 else str(strategy)


def _kept(idle: int) -> float:
    """Share of the evidence that is left after so many rounds without a trial."""
    return math.exp(-max(idle - _FRESH_ROUNDS, 0) / _MEMORY_ROUNDS)


def _drafter_of(shape: str) -> str:
    return shape.split(":")[0]


def _depth(strategy: Strategy) -> int:
    return min(strategy.depth, strategy.tokens)


def _asked(strategy: Strategy) -> int:
    """Draft tokens of a request when the drafter proposes all that it may."""
    return _depth(strategy) if strategy.width == 1 else strategy.tokens
