"""The gate alone, with rates given by hand."""

from collections.abc import Callable
from itertools import pairwise

import pytest

from tlt_core.speculation import OFF, Strategy
from tlt_core.tuner.gate import Gate, Offer

ARM = Strategy("eagle", 4, 1, 4)
MS = 1e-3


def gate(*, allowance_rounds: float = 1000.0) -> Gate:
    """One arm, and as a rule a budget that never binds."""
    return Gate([ARM], share=0.01, allowance_rounds=allowance_rounds, max_interval=64)


def play(
    subject: Gate,
    rounds: int,
    *,
    rate: Callable[[int], float],
    hope: float,
    trusted: bool = True,
    live: int = 1,
    entry_s: float = 0.0,
) -> list[Strategy]:
    """OFF makes 100 tokens a second, the arm rate(i) in round i and `hope` at best; rounds do as promised."""
    chosen = []
    for i in range(rounds):
        offers = {OFF: Offer(100.0, live * 10 * MS), ARM: Offer(rate(i), live * 12 * MS, entry_s)}
        arm = subject.choose(live, offers, lambda a: trusted or a.is_off, lambda: {OFF: 100.0, ARM: hope}, 10 * MS)
        subject.settle(arm, round(offers[arm].rate * offers[arm].seconds), offers[arm].seconds)
        chosen.append(arm)
    return chosen


def test_a_clear_gain_switches_at_once_and_a_small_one_when_it_lasts() -> None:
    assert play(gate(), 3, rate=lambda _: 130.0, hope=0.0) == [ARM] * 3
    small = play(gate(), 30, rate=lambda _: 103.0, hope=0.0)
    assert small.index(ARM) == 6  # seven rounds of 3 % less the margin of 1.5 %
    assert small[6:].count(ARM) >= 23  # plain decoding is looked at once more


def test_a_drafter_that_has_to_catch_up_promises_that_much_before() -> None:
    """Three rounds' time at gains of 18.5 % a round, beside the tenth of a round: 17 rounds."""
    chosen = play(gate(), 40, rate=lambda _: 120.0, hope=0.0, entry_s=30 * MS)
    assert chosen.index(ARM) == 16
    assert set(chosen[16:]) == {ARM}, "the current drafter need not catch up"
    assert play(gate(), 3, rate=lambda _: 500.0, hope=0.0, entry_s=30 * MS) == [ARM] * 3


def test_a_probe_is_paid_with_what_its_drafter_has_to_catch_up_with() -> None:
    assert ARM in play(gate(allowance_rounds=2.0), 10, rate=lambda _: 50.0, hope=200.0)
    assert ARM not in play(gate(allowance_rounds=2.0), 10, rate=lambda _: 50.0, hope=200.0, entry_s=30 * MS)


def test_noise_around_a_tie_does_not_switch() -> None:
    assert set(play(gate(), 200, rate=lambda i: 104.0 if i % 2 else 97.0, hope=0.0)) == {OFF}


def test_an_arm_without_evidence_is_probed_and_not_chosen() -> None:
    subject = gate()
    chosen = play(subject, 400, rate=lambda _: 200.0, hope=0.0, trusted=False)
    assert set(chosen) == {OFF}
    chosen = play(subject, 400, rate=lambda _: 50.0, hope=200.0, trusted=False)
    assert 12 <= chosen.count(ARM) <= 60  # bursts of six at growing intervals
    assert subject.current == OFF


def test_probes_become_rarer_until_something_changes() -> None:
    subject = gate()
    chosen = play(subject, 600, rate=lambda _: 50.0, hope=200.0, live=4)
    starts = [i for i in range(1, 600) if chosen[i] == ARM and chosen[i - 1] == OFF]
    gaps = [b - a for a, b in pairwise(starts)]
    assert gaps == sorted(gaps)
    assert gaps[-1] > 3 * gaps[0]
    while play(subject, 1, rate=lambda _: 50.0, hope=200.0, live=4) == [OFF]:
        pass
    assert ARM not in play(subject, 12, rate=lambda _: 50.0, hope=200.0, live=4)[2:]
    subject.reset("eagle")
    assert play(subject, 1, rate=lambda _: 50.0, hope=200.0, live=4) == [ARM]
    assert ARM not in play(subject, 12, rate=lambda _: 50.0, hope=200.0, live=4)[2:]
    assert ARM in play(subject, 5, rate=lambda _: 50.0, hope=200.0, live=3)  # the batch shrank


def test_no_probe_that_cannot_be_paid() -> None:
    assert ARM not in play(gate(allowance_rounds=0.1), 10, rate=lambda _: 50.0, hope=200.0)
    subject = gate(allowance_rounds=0.1)
    chosen = play(subject, 1000, rate=lambda _: 50.0, hope=200.0)
    assert ARM in chosen
    assert subject.lost_s == pytest.approx(2 * MS * chosen.count(ARM))  # one token in 12 ms, not in 10
    assert subject.lost_s <= 0.01 * subject.total_s + 1 * MS


def test_plain_decoding_is_looked_at_again_when_the_arm_is_hardly_better() -> None:
    assert OFF in play(gate(), 200, rate=lambda _: 115.0, hope=0.0)[5:]
    assert OFF not in play(gate(), 200, rate=lambda _: 300.0, hope=0.0)[5:]
