"""The rule alone, with rates given by hand."""

from collections.abc import Callable
from itertools import pairwise

import pytest

from tlt_core.items.speculation import OFF, Strategy
from tlt_core.tuner.rule import Estimate, Rule

CHAIN, OTHER = Strategy("eagle", 4, 1, 4), Strategy("ngram", 4, 1, 4)
MS = 1e-3


def play(
    subject: Rule,
    rounds: int,
    *,
    rate: Callable[[int], float],
    hope: float,
    known: bool = True,
    live: int = 1,
    draft_s: float = 2 * MS,
    strategies: tuple[Strategy, ...] = (CHAIN,),
) -> list[Strategy]:
    """OFF makes 100 tokens a second, the others rate(i) in round i and `hope` at best; rounds do as promised."""
    chosen = []
    for i in range(rounds):
        estimates = {OFF: Estimate(100.0, live * 10 * MS)}
        estimates |= {s: Estimate(rate(i), live * 10 * MS + draft_s) for s in strategies}
        hoped = {s: Estimate(100.0 if s.is_off else hope, e.seconds) for s, e in estimates.items()}
        strategy = subject.choose(
            live, estimates, known=lambda s: known or s.is_off, hopes=lambda hoped=hoped: hoped, single_s=10 * MS
        )
        seconds = estimates[strategy].seconds
        subject.account(strategy, round(estimates[strategy].rate * seconds), seconds)
        chosen.append(strategy)
    return chosen


def starts(chosen: list[Strategy]) -> list[int]:
    """Rounds in which a stretch of speculation begins."""
    return [i + 1 for i, (a, b) in enumerate(pairwise(chosen)) if a.is_off and not b.is_off]


def test_a_gain_beyond_the_margin_changes_the_strategy_and_noise_within_it_does_not() -> None:
    assert play(Rule([CHAIN]), 3, rate=lambda _: 104.0, hope=0.0)[0] == CHAIN
    assert set(play(Rule([CHAIN]), 200, rate=lambda i: 102.0 if i % 2 else 97.0, hope=0.0)) == {OFF}


def test_a_strategy_without_evidence_is_probed_and_not_chosen() -> None:
    subject = Rule([CHAIN])
    assert set(play(subject, 400, rate=lambda _: 200.0, hope=0.0, known=False)) == {OFF}
    chosen = play(subject, 400, rate=lambda _: 50.0, hope=200.0, known=False)
    assert 6 <= chosen.count(CHAIN) <= 60
    assert subject.current == OFF


def test_a_probe_takes_four_drafts() -> None:
    for live, rounds in ((1, 4), (2, 2), (3, 2), (4, 1), (8, 1)):
        chosen = play(Rule([CHAIN]), 12, rate=lambda _: 99.0, hope=200.0, live=live, draft_s=0.2 * MS)
        assert chosen.count(CHAIN) == rounds


def test_drafters_take_turns_and_the_cheapest_strategy_of_one_is_probed() -> None:
    dear = Strategy("eagle", 8, 1, 8)
    subject = Rule([dear, CHAIN, OTHER])
    seconds = {OFF: 10 * MS, dear: 14 * MS, CHAIN: 12 * MS, OTHER: 12.5 * MS}
    chosen = []
    for _ in range(4000):
        estimates = {s: Estimate(100.0 if s.is_off else 50.0, seconds[s]) for s in seconds}
        hoped = {s: Estimate(300.0, 0.0) for s in seconds}
        hoped[OFF] = estimates[OFF]
        chosen.append(
            subject.choose(1, estimates, known=lambda _: True, hopes=lambda hoped=hoped: hoped, single_s=10 * MS)
        )
        subject.account(chosen[-1], 1, seconds[chosen[-1]])
    first = [b.drafter for a, b in pairwise(chosen) if a != b and not b.is_off]
    assert len(first) > 4
    assert all(a != b for a, b in pairwise(first)), first
    assert dear not in chosen


def test_probes_stay_within_their_budget() -> None:
    subject = Rule([CHAIN])
    chosen = play(subject, 3000, rate=lambda _: 50.0, hope=200.0)
    assert 12 <= chosen.count(CHAIN) <= 180
    assert subject.lost_s == pytest.approx(2 * MS * chosen.count(CHAIN))  # one token in 12 ms, not in 10
    assert subject.lost_s <= 0.008 * subject.total_s + 20 * MS
    gaps = [b - a for a, b in pairwise(starts(chosen))]
    assert min(gaps) >= 16


def test_a_change_makes_a_drafter_due_at_once() -> None:
    """A probe that accepts half loses a quarter of a plain round here, of a budget of two."""
    subject = Rule([CHAIN])
    settings = {"rate": lambda _: 99.0, "hope": 200.0, "live": 4, "draft_s": 1 * MS}
    assert play(subject, 8, **settings).count(CHAIN) == 1
    assert CHAIN not in play(subject, 8, **settings)
    subject.reset("eagle")
    assert play(subject, 2, **settings) == [CHAIN, OFF]
