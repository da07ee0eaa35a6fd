"""Which differences from plain decoding count: planted ones, and near-ties by a wider tolerance."""

import dataclasses

import pytest
import torch

from conf.rollout import SpeculationConfig
from tlt_core.export import drafter_trial
from tlt_core.export.drafter_trial import Workload, decode
from tlt_core.items.types import GenerationRequest, NoiseKey, Rollout, SamplingParams
from tlt_core.model.decoder import Decoder


@pytest.fixture(params=[0.0, 1.0])
def workload(tiny_decoder: Decoder, request: pytest.FixtureRequest) -> Workload:
    requests = [GenerationRequest(NoiseKey(0, 1, i, 0), torch.tensor([1, 5, 9 + i]).int()) for i in range(3)]
    params = SamplingParams(temperature=request.param, max_new_tokens=8, stop_token_ids=())
    return Workload(tiny_decoder, requests, params, 2)


def _plain(workload: Workload) -> dict[NoiseKey, Rollout]:
    return dict(decode(workload, SpeculationConfig(policy="off"), seed=0).rollouts)


def _altered(rollouts: dict[NoiseKey, Rollout], *, other: int = 0, missing: int = 0) -> dict[NoiseKey, Rollout]:
    """The first response with another token, and without its last ones."""
    key, rollout = next(iter(rollouts.items()))
    tokens = rollout.tokens[: len(rollout.tokens) - missing].clone()
    tokens[5] = (tokens[5] + other) % 64
    shorter = rollout.logprobs[: len(tokens) - rollout.prompt_len]
    return rollouts | {key: dataclasses.replace(rollout, tokens=tokens, logprobs=shorter)}


def test_another_or_a_missing_token_is_a_change_unless_it_scores_the_same(
    workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = _plain(workload)
    other, shorter = _altered(plain, other=1), _altered(plain, missing=2)
    assert drafter_trial._differences(workload, plain, dict(plain)) == (0, 0)
    assert drafter_trial._differences(workload, plain, other) == (1, 0)
    monkeypatch.setattr(drafter_trial, "_NEAR_TIE", 1e9)
    assert drafter_trial._differences(workload, plain, other) == (0, 1)
    assert drafter_trial._differences(workload, plain, shorter) == (1, 0)


def test_the_gap_is_zero_for_the_token_itself_only(workload: Workload) -> None:
    key, rollout = next(iter(_plain(workload).items()))
    for at in range(rollout.prompt_len, len(rollout.tokens)):
        chosen = int(rollout.tokens[at])
        gaps = [drafter_trial._gap(workload, key, rollout.tokens, at=at, other=token) for token in range(64)]
        assert gaps[chosen] == 0.0
        assert sum(gap == 0.0 for gap in gaps) == 1
