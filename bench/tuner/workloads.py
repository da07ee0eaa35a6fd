"""Simulated workloads: the throughput of each policy, and how soon it follows a drafter that turns bad and good again.

In some workloads speculation pays (tail, near break-even, heavy tail).  In others it cannot pay, and a tuner must not
lose (hostile), or everything is over before much can be learnt (short).
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from bench.tuner.simulator import Engine, Hits, PlayedRound, pass_seconds
from tlt_core.items.speculation import OFF, Strategy
from tlt_core.tuner.policies import FixedTuner, Kind, RecordedTuner, make_tuner

POLICIES = ("cost_model", "beg_mab", "threshold", "off")
NEVER = 1000  # recovery rounds of a tuner that had not recovered by then
_SETTLE = 150  # rounds before a swap
_WINDOW = 32  # rounds over which a tuner must do well to have recovered
_RECOVERED = 0.9  # of the best strategy's throughput
_LONG = 10**6  # tokens: requests that outlast any swap


class ThresholdTuner(FixedTuner):
    """The rule of serving engines: the first strategy while at most `max_live` requests live, plain decoding above."""

    def __init__(self, strategies: Sequence[Strategy], *, max_live: int = 32) -> None:
        super().__init__(strategies)
        self._max_live = max_live

    def choose(self, rows: Sequence[int], context: int) -> Strategy:
        return OFF if len(rows) > self._max_live else super().choose(rows, context)


def heavy_tail(rng: random.Random) -> int:
    """Log-normal: the longest of 48 is about ten times the median."""
    return 8 + int(min(60 * rng.lognormvariate(0, 1.1), 900))


@dataclass(frozen=True)
class SimulatedWork:
    """Requests, and how well each drafter does on them.  It ends when every request has its tokens."""

    eagle3: Hits
    ngram: Hits
    live: int
    lengths: int | Callable[[random.Random], int]
    waiting: int = 0

    def engine(self, *, seed: int, compare: Sequence[Strategy] = ()) -> Engine:
        """A new engine; the requests depend on the seed alone."""
        lengths = self.lengths if callable(self.lengths) else (lambda _, length=self.lengths: length)
        hits = {"eagle3": self.eagle3, "ngram": self.ngram}
        return Engine(hits, self.live, lengths, waiting=self.waiting, seed=seed, compare=compare)


WORKLOADS: Mapping[str, SimulatedWork] = {
    "tail, good drafter": SimulatedWork(Hits(0.8), Hits(0.4, cover=0.5), 2, 600),
    "tail, good n-gram": SimulatedWork(Hits(0.15), Hits(0.85, 0.99, cover=0.8), 1, 1600),
    "near break-even": SimulatedWork(Hits(0.65, spread=0.2), Hits(0.3, cover=0.5, spread=0.2), 8, 500),
    "heavy tail": SimulatedWork(Hits(0.6, spread=0.25), Hits(0.4, cover=0.5, spread=0.3), 16, heavy_tail, waiting=32),
    "hostile, useless drafters": SimulatedWork(Hits(0.0), Hits(0.0), 2, 300),
    "hostile, no proposals": SimulatedWork(Hits(0.0, cover=0.0), Hits(0.0, cover=0.0), 4, 300),
    "hostile, weak drafters": SimulatedWork(Hits(0.17), Hits(0.1, cover=0.4), 8, 300),
    "hostile, large batch": SimulatedWork(Hits(0.4, spread=0.2), Hits(0.2), 32, 300),
    "short, useless drafters": SimulatedWork(Hits(0.05), Hits(0.05), 16, 60),
    "short, large batch": SimulatedWork(Hits(0.3, spread=0.2), Hits(0.2), 32, 80),
}
SWAP_LIVE = (1, 2, 4, 8)  # live requests of the swaps
_SWAPPED = SimulatedWork(Hits(0.85), Hits(0.1, cover=0.3), 1, _LONG)


def tuner_of(kind: str, strategies: Sequence[Strategy], *, seed: int) -> RecordedTuner:
    """One of POLICIES as a worker makes it, calibrated on the simulated engine."""
    made = ThresholdTuner(strategies) if kind == "threshold" else make_tuner(cast(Kind, kind), strategies, seed=seed)
    made.calibrate(pass_seconds, max_live=32, max_tokens=160, budget_s=1.0)
    return made


def earnings(work: SimulatedWork, strategies: Sequence[Strategy], *, seed: int) -> dict[str, float]:
    """Tokens a second of every policy and of each single strategy (`fixed STRATEGY`), on the same requests."""
    earned: dict[str, float] = {}
    for kind in POLICIES:
        engine = work.engine(seed=seed)
        engine.run(tuner_of(kind, strategies, seed=seed))
        earned[kind] = engine.rate
    for strategy in strategies:
        engine = work.engine(seed=seed)
        engine.run(make_tuner("fixed", [strategy]))
        earned[f"fixed {strategy}"] = engine.rate
    return earned


def best_fixed(earned: Mapping[str, float]) -> float:
    """The highest of plain decoding and of each single strategy."""
    return max(rate for name, rate in earned.items() if name == "off" or name.startswith("fixed"))


def recovery(kind: str, strategies: Sequence[Strategy], *, live: int, seed: int) -> dict[str, float]:
    """Rounds until a tuner does well again after its good drafter turned useless, and after it turned good again: the
    first round from which on it reaches, over 32 rounds, at least 0.9 of the best strategy's throughput in them."""
    work = SimulatedWork(_SWAPPED.eagle3, _SWAPPED.ngram, live, _LONG)
    engine, adaptive = work.engine(seed=seed, compare=(OFF, *strategies)), tuner_of(kind, strategies, seed=seed)
    engine.run(adaptive, _SETTLE)
    good = engine.hits["eagle3"]
    figures: dict[str, float] = {}
    for name, hits in (("bad", Hits(0.0)), ("back", good)):
        engine.hits["eagle3"] = hits
        engine.history.clear()
        engine.run(adaptive, _WINDOW)
        while not (recovered := _does_well(engine.history[-_WINDOW:])) and len(engine.history) < NEVER:
            engine.run(adaptive, 1)
        figures[f"rounds_{name}"] = float(len(engine.history) - _WINDOW if recovered else NEVER)
        engine.run(adaptive, _SETTLE)
    return figures


def _does_well(latest: Sequence[PlayedRound]) -> bool:
    best = sum(r.best_rate * r.seconds for r in latest)
    return sum(r.tokens for r in latest) >= _RECOVERED * best
