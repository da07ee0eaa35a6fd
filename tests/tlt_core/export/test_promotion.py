"""The rule of promotion, on figures given by hand."""

import math

import pytest

from conf.drafter import RetrainConfig
from tlt_core.export.drafter_trial import Trial
from tlt_core.export.promotion import decide

CFG = RetrainConfig(min_gain=0.1, min_speed=0.9)
CHAMPION = Trial(accept_length=2.0, tokens_per_s=100.0, changed=0, near_ties=0)


@pytest.mark.parametrize(
    ("accept_length", "tokens_per_s", "changed", "outcome", "said"),
    [
        (2.2, 90.0, 0, "promoted", "acceptance length 2.200 against 2.000 of v3"),
        (2.19, 500.0, 0, "refused", "retrain.min_gain=0.1"),
        (2.5, 89.0, 0, "refused", "retrain.min_speed=0.9"),
        (2.9, 200.0, 1, "refused", "1 responses differ"),
    ],
)
def test_better_fast_enough_and_lossless(
    accept_length: float, tokens_per_s: float, changed: int, outcome: str, said: str
) -> None:
    candidate = Trial(accept_length, tokens_per_s, changed, near_ties=2)
    decision = decide(candidate, CHAMPION, rival_name="v3", cfg=CFG)
    assert decision.outcome == outcome
    assert said in decision.reason


@pytest.mark.parametrize("figure", ["accept_length", "tokens_per_s"])
def test_without_a_finite_figure_nobody_is_promoted(figure: str) -> None:
    better = Trial(accept_length=9.0, tokens_per_s=900.0, changed=0, near_ties=0)
    for whose, value in (("the candidate", math.inf), ("v3", math.nan)):
        trials = {"the candidate": better, "v3": CHAMPION}
        trials[whose] = trials[whose]._replace(**{figure: value})
        decision = decide(*trials.values(), rival_name="v3", cfg=CFG)
        assert decision.outcome == "refused"
        assert f"{figure} of {whose} is {value}" in decision.reason


def test_a_candidate_as_good_as_the_champion_wins_only_where_no_gain_is_asked_for() -> None:
    assert decide(CHAMPION, CHAMPION, rival_name="v3", cfg=CFG).outcome == "refused"
    no_gain = RetrainConfig(min_gain=0.0, min_speed=0.0)
    assert decide(CHAMPION, CHAMPION, rival_name="v3", cfg=no_gain).outcome == "promoted"
