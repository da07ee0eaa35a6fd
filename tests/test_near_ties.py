"""Differences between two engines are told apart: near-ties, and all others."""

from dataclasses import replace

import pytest
import torch

from tests.near_ties import compare
from tests.tlt_core.rollout.playing import play, requests
from tlt_core.items.types import SamplingParams
from tlt_core.model.load import random_decoder
from tlt_core.rollout.engine import RolloutEngine

PARAMS = SamplingParams(max_new_tokens=60)


def decoder(config):
    made = random_decoder(config, seed=0, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if not name.endswith("norm.weight"):
                parameter *= 8  # decided enough that a wrong token is no near-tie
    return made


def responses(made):
    return play(RolloutEngine(made, max_live=8, max_len=80, static=False), requests(8), PARAMS)[0]


def test_rounding_explains_what_it_changes(tiny_config) -> None:
    """Weights rounded to bfloat16 are another model, by about a rounding."""
    exact, rounded = decoder(tiny_config), decoder(tiny_config)
    with torch.no_grad():
        for parameter in rounded.parameters():
            parameter.copy_(parameter.bfloat16())
    mine = responses(exact)
    found = compare(mine, responses(rounded), rounded, exact, PARAMS)
    assert found.near_ties > 0
    assert found.unexplained == 0
    assert found.tokens < sum(len(r.tokens) - r.prompt_len for r in mine.values())


@pytest.mark.parametrize("wrong", ["token", "length"])
def test_what_rounding_does_not_explain_is_counted(tiny_config, wrong: str) -> None:
    exact = decoder(tiny_config)
    mine = responses(exact)
    assert compare(mine, mine, exact, exact, PARAMS)[1:] == (0, 0, 0.0)
    key, rollout = next((key, r) for key, r in mine.items() if len(r.completion) > 5)
    tokens, logprobs = rollout.tokens.clone(), rollout.logprobs
    if wrong == "token":
        tokens[-3] = (tokens[-3] + 1) % 64
    else:
        tokens, logprobs = tokens[:-1], logprobs[:-1]
    found = compare(mine, mine | {key: replace(rollout, tokens=tokens, logprobs=logprobs)}, exact, exact, PARAMS)
    assert (found.near_ties, found.unexplained) == (0, 1)
