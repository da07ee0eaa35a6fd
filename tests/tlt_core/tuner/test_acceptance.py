"""Acceptance estimates against the rates that made the rounds."""

import random
from statistics import fmean

import pytest

from tlt_core.items.speculation import OFF, RoundReport, Strategy
from tlt_core.tuner.acceptance import Acceptance

SHORT, LONG = Strategy("eagle", 2, 1, 2), Strategy("eagle", 6, 1, 6)
TREE, OTHER = Strategy("eagle", 4, 4, 16), Strategy("ngram", 4, 1, 4)
STRATEGIES = (SHORT, LONG, TREE, OTHER)


def report(strategy: Strategy, offered: list[int], accepted: list[int]) -> RoundReport:
    """A round with these outcomes; chains draft what they offer."""
    drafted = [strategy.tokens if o and strategy.width > 1 else o for o in offered]
    return RoundReport(strategy, len(offered), 100, tuple(drafted), tuple(offered), tuple(accepted), 1e-3, 1e-2)


def play(
    model: Acceptance, strategy: Strategy, rates: list[float], rounds: int, *, cover: float = 1.0, seed: int = 0
) -> None:
    """Rounds in which row i accepts each token with rates[i]."""
    rng = random.Random(seed)
    for _ in range(rounds):
        offered = [strategy.depth if rng.random() < cover else 0 for _ in rates]
        accepted = [
            next((j for j in range(o) if rng.random() >= rate), o) for o, rate in zip(offered, rates, strict=True)
        ]
        model.observe(range(len(rates)), report(strategy, offered, accepted))


def test_expected_tokens_of_a_chain() -> None:
    """The mean of ten models: each remembers 100 trials of a position, so a single one may be off by a tenth."""
    models = [Acceptance(STRATEGIES) for _ in range(10)]
    for seed, model in enumerate(models):
        play(model, LONG, [0.6] * 16, 60, seed=seed)
    expected = [model.expected(range(16)) for model in models]
    assert fmean(e[LONG].accepted for e in expected) / 16 == pytest.approx(sum(0.6**j for j in range(1, 7)), rel=0.07)
    assert fmean(e[SHORT].accepted for e in expected) / 16 == pytest.approx(0.6 + 0.36, rel=0.07)
    assert expected[0][SHORT].drafted == pytest.approx(32, rel=0.03)


def test_a_drafter_that_rarely_proposes_verifies_little_and_accepts_little() -> None:
    """A quarter of the drafts exist: each of those accepts .8 + .64 + .51 + .41 tokens."""
    model = Acceptance(STRATEGIES)
    play(model, OTHER, [0.8] * 16, 60, cover=0.25)
    expected = model.expected(range(16))[OTHER]
    assert expected.drafted / 16 == pytest.approx(0.25 * 4, rel=0.25)
    assert expected.accepted / 16 == pytest.approx(0.25 * sum(0.8**j for j in range(1, 5)), rel=0.25)


def test_each_request_has_its_own_rate_and_a_new_one_the_common() -> None:
    model = Acceptance(STRATEGIES)
    play(model, LONG, [0.9, 0.9, 0.9, 0.1], 60)
    good, bad, new = (model.expected([row])[SHORT].accepted for row in (0, 3, 99))
    assert good > 1.3
    assert bad < 0.45
    assert bad < new < good
    model.forget(3)
    assert model.expected([3])[SHORT].accepted == new


def test_chains_of_all_lengths_share_what_is_known_and_a_tree_has_to_be_tried() -> None:
    model = Acceptance(STRATEGIES)
    play(model, SHORT, [0.5] * 8, 40)
    assert model.known(LONG)
    assert not model.known(TREE)
    expected = model.expected(range(8))
    assert expected[LONG].accepted > expected[SHORT].accepted > 0.6 * 8
    play(model, SHORT, [0.0] * 8, 40)
    assert model.expected(range(8))[LONG].accepted < 0.1 * 8
    play(model, TREE, [0.5] * 8, 1)
    assert model.known(TREE)


def test_optimism_shrinks_with_evidence_and_grows_with_absence() -> None:
    model = Acceptance(STRATEGIES)

    def hope() -> float:
        return model.expected(range(4), optimistic=True)[OTHER].accepted

    assert not model.known(OTHER)
    assert model.known(OFF)
    untried = hope()
    play(model, OTHER, [0.0] * 4, 20)
    tried = hope()
    assert model.known(OTHER)
    assert tried < 0.2 * untried
    mean = model.expected(range(4))[OTHER].accepted
    for _ in range(200):
        model.observe(range(4), report(OFF, [0] * 4, [0] * 4))
    assert hope() > 2 * tried
    assert model.expected(range(4))[OTHER].accepted == pytest.approx(mean, abs=0.3)
    model.discount("ngram")
    once = hope()
    assert once > 0.5 * untried
    model.discount("ngram")  # the policy after the drafter
    model.discount(None)
    assert hope() == pytest.approx(once, rel=1e-3)


@pytest.mark.parametrize(("change", "weight"), [(0.01, 100), (0.1, 24), (0.5, 9), (float("inf"), 9)])
def test_a_small_change_leaves_what_is_known(change: float, weight: int) -> None:
    """Four trials that fail move a share by 4 / weight of itself, where the weight was 100 at most."""
    model, unchanged = Acceptance(STRATEGIES), Acceptance(STRATEGIES)
    for one in (model, unchanged):
        play(one, LONG, [0.8] * 4, 60)
    before = unchanged.expected(range(9, 10))[LONG].accepted
    model.discount(LONG.drafter, change=change)
    for one in (model, unchanged):
        play(one, LONG, [0.2] * 4, 1)
    slow, fast = (before - one.expected(range(9, 10))[LONG].accepted for one in (unchanged, model))
    assert slow <= fast
    assert slow / fast == pytest.approx(weight / 100, rel=0.05)
