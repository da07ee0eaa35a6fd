"""The canary's decision: who is refused, and how often wrongly."""

import math
import random

import pytest

from tlt_core.idle_training.comparison import Comparison, Group

TRIALS = 400


def test_by_hand():
    comparison = Comparison.of([Group(10, 20, 24), Group(30, 60, 54), Group(0, 0, 0)])
    assert comparison == Comparison(2, 40, 80, 78, 16 + 36, 40 - 180, 100 + 900)
    assert (comparison.used_length, comparison.candidate_length) == (3.0, 2.95)
    assert comparison.gain == pytest.approx(-0.05)
    # d - gain n = 4.5 and -4.5
    assert comparison.error == pytest.approx(math.sqrt(2 / 1 * 2 * 4.5**2) / 40)
    assert not comparison.is_worse(errors=1.0)
    assert comparison.is_worse(errors=0.0)
    one = Comparison.of([Group(10, 20, 19)])
    assert one.is_worse(errors=9.0), "one group tells no error"
    assert not Comparison().is_worse(errors=0.0)


def test_change_is_how_far_lengths_may_lie_apart():
    """Gain 0.1 or -0.1 tokens a round, certain, of a length of 3; with one group nothing is certain."""
    for sign in (1, -1):
        known = Comparison.of([Group(100, 200, 200 + sign * 10), Group(200, 400, 400 + sign * 20)])
        assert known.change == pytest.approx(0.1 / 3)
    assert Comparison.of([Group(100, 200, 210)]).change == float("inf")
    unsure = Comparison.of([Group(100, 200, 190), Group(100, 200, 210)])
    assert unsure.gain == 0
    assert unsure.change == pytest.approx(unsure.error / 3)


def test_workers_add_up():
    groups = [Group(10, 20, 24), Group(30, 60, 54), Group(7, 9, 9), Group(12, 40, 40)]
    assert Comparison.of(groups[:1]).plus(Comparison.of(groups[1:])) == Comparison.of(groups)
    assert Comparison().plus(Comparison.of(groups)) == Comparison.of(groups)


def planted(gain: float, *, seed: int, groups: int = 8, starts: int = 128) -> Comparison:
    """Chains of six drafts along responses of very different ease; the candidate differs on one start in five.

    gain: tokens a round, over all prompts; a prompt's own differs from it by 0.05 (standard deviation).
    """
    draw = random.Random(seed)
    counts = []
    for _ in range(groups):
        ease, own = draw.uniform(0.4, 0.9), gain + draw.gauss(0, 0.05)
        used = candidate = 0
        for _ in range(starts):
            length = next((k for k in range(6) if draw.random() > ease), 6)
            used += length
            moved = 0
            if draw.random() < 0.2:
                moved = 1 if draw.random() < 0.5 + own / 0.4 else -1
            candidate += length + moved
        counts.append(Group(starts, used, candidate))
    return Comparison.of(counts)


def refused(gain: float, *, errors: float = 1.0) -> float:
    return sum(planted(gain, seed=seed).is_worse(errors=errors) for seed in range(TRIALS)) / TRIALS


def test_power():
    """1,024 tokens of eight prompts, as many as the canary takes."""
    assert refused(+0.08) <= 0.01
    assert 0.08 <= refused(0.0) <= 0.22, "one-sided, at one standard error: 0.16"
    assert refused(-0.08) >= 0.8
    assert refused(-0.15) >= 0.99
    # The rule that any lower figure is refused throws every other candidate away that is as good.
    assert refused(0.0, errors=0.0) == pytest.approx(0.5, abs=0.08)
