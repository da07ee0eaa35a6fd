"""The cost of training to those who decode is found in rounds of mixed shapes, and nothing else is taken for it."""

import math
import random

import pytest

from tlt_core.items.types import WorkerSpan, WorkerState
from tlt_core.spot.slowdown import PaceSums, TimedRound, beside_s, pace

BUSY, IDLE, TRAINING = WorkerState.BUSY, WorkerState.IDLE, WorkerState.TRAINING


def test_by_hand():
    """Shape a: 2 and 2 rounds.  Shape b: one round beside training, none beside a pause."""
    spans = [
        WorkerSpan(0, BUSY, 0.0, 10.0),
        WorkerSpan(1, BUSY, 0.0, 2.0),
        WorkerSpan(1, TRAINING, 2.0, 5.0),
        WorkerSpan(1, IDLE, 5.0, 10.0),
    ]
    rounds = [
        TimedRound("a", 1.9, 9.0),  # before anybody was idle
        TimedRound("a", 3.0, 0.4),
        TimedRound("a", 4.0, 0.1),
        TimedRound("a", 5.1, 0.3),  # on both sides
        TimedRound("b", 4.8, 0.5),
        TimedRound("a", 6.0, 0.1),
        TimedRound("a", 7.0, 0.1),
    ]
    sums = pace({0: rounds}, spans)
    beside, pausing = [math.log(0.4), math.log(0.1)], [math.log(0.1)] * 2
    difference = (sum(beside) - sum(pausing)) / 2
    squares = 2 * (math.log(4) / 2) ** 2
    assert sums == pytest.approx(PaceSums(1.0, difference, squares, 2))
    assert sums.difference() == (0.0, math.inf), "two degrees of freedom tell no error"
    four = sums.plus(sums).plus(sums).plus(sums)
    assert four.difference() == pytest.approx((difference, math.sqrt(4 * squares / 8 / 4)))
    assert difference == pytest.approx(math.log(2))
    assert beside_s(spans, (IDLE, TRAINING), until_s=9.0) == 7.0
    assert beside_s(spans, (BUSY,), until_s=9.0) == 9.0


def test_nothing_to_compare():
    assert PaceSums().difference() == (0.0, math.inf)
    only_training = [WorkerSpan(0, BUSY, 0.0, 9.0), WorkerSpan(1, TRAINING, 0.0, 9.0)]
    rounds = [TimedRound("a", 1.0, 0.1), TimedRound("a", 2.0, 0.1)]
    assert pace({0: rounds}, only_training).difference()[1] == math.inf


def phase(slowdown: float, *, seed: int) -> PaceSums:
    """Ten seconds of rounds of ten shapes with noise of 10 %, and pauses of 0.3 s every four seconds."""
    draw = random.Random(seed)
    now, rounds = 0.0, []
    spans = [WorkerSpan(1, IDLE if part % 2 else TRAINING, *x) for part, x in enumerate(alternate(10.0))]
    while now < 10.0:
        shape = draw.randrange(10)
        seconds = (0.02 + 0.01 * shape) * math.exp(draw.gauss(0, 0.1))
        trains = any(s.state == TRAINING and s.start_s <= now < s.end_s for s in spans)
        seconds *= 1 + slowdown * trains
        now += seconds
        rounds.append(TimedRound(shape, now, seconds))
    return pace({0: rounds}, [WorkerSpan(0, BUSY, 0.0, now), *spans])


def alternate(until_s: float):
    start = 0.0
    while start < until_s:
        yield start, start + 3.7
        yield start + 3.7, start + 4.0
        start += 4.0


@pytest.mark.parametrize("slowdown", [0.0, 0.05, 0.2])
def test_a_planted_slowdown_is_found_within_its_error(slowdown):
    """Its error says how far off it is: 60 estimates of eight phases each; their standard scores are standard."""
    scores, errors = [], []
    for trial in range(60):
        total = PaceSums()
        for number in range(8):
            total = total.plus(phase(slowdown, seed=100 * trial + number))
        difference, error = total.difference()
        scores.append((difference - math.log1p(slowdown)) / error)
        errors.append(error)
    assert abs(sum(scores) / len(scores)) < 0.5
    assert 0.7 < math.sqrt(sum(s * s for s in scores) / len(scores)) < 1.4
    assert max(errors) < 0.03


def test_what_is_long_ago_weighs_less():
    old, new = PaceSums(10.0, 3.0, 1.0, 50.0), PaceSums(10.0, 0.0, 1.0, 50.0)
    assert old.plus(new).difference()[0] == pytest.approx(0.15)
    assert old.plus(new, keep=0.5).difference()[0] == pytest.approx(0.1)
