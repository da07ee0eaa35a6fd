"""Figures by which a drafter is promoted."""

import pytest

from bench.rollout import Workload, run
from conf.rollout import SpeculationConfig
from tests.tlt_core.rollout.playing import requests
from tlt_core.items.types import SamplingParams
from tlt_core.model.decoder import Decoder


@pytest.fixture
def workload(tiny_decoder: Decoder) -> Workload:
    """Greedy decoding of a random model soon repeats itself, which n-grams foresee."""
    return Workload("w", tiny_decoder, requests(8), SamplingParams(temperature=0.0, max_new_tokens=80), 4)


def test_the_accepted_length_is_that_of_rounds_with_drafts(workload: Workload) -> None:
    strategies = [{"drafter": "ngram", "depth": 3, "tokens": 3}]
    measured = run(workload, SpeculationConfig(policy="fixed", strategies=strategies), seed=0)
    figures, requested = measured.figures, sum(len(r.completion) for r in measured.rollouts.values())
    assert figures["tokens"] == requested == 8 * 80
    assert figures["active_frac"] == 1.0
    # Every round drafts, so the two differ by drafts that a request's end cuts off.
    assert 1.3 < figures["tokens_per_request_round"] <= figures["accept_length"] < 4
    assert figures["accept_length"] == pytest.approx(figures["tokens_per_request_round"], rel=0.05)
