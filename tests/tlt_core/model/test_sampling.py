"""The sampling policy is softmax(logits / T) after filters, and its noise depends on the key alone."""

import pytest
import torch

from conf.section import MOST_STEPS
from tlt_core.items.types import NoiseKey, SamplingParams
from tlt_core.model import sampling
from tlt_core.model.sampling import (
    NoiseStep,
    choose,
    choose_no_sync,
    lognorms,
    of_validation,
    policy_scores,
    row_keys,
    stream_key,
)

LOGITS = torch.tensor([2.0, 1.0, 0.5, -1.0, 0.0, 3.0, -2.0, 1.5])


def draw(params: SamplingParams, count: int = 40_000) -> tuple[torch.Tensor, torch.Tensor]:
    streams = torch.tensor([stream_key(NoiseKey(1, 2, 3, sample)) for sample in range(count)])
    return choose(LOGITS.expand(count, -1), row_keys(streams, torch.full((count,), 9)), params)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_marginals_match_softmax(temperature):
    """Chi-square of 40,000 draws over a vocabulary of 8: 24.3 is the 0.999 quantile at 7 degrees of freedom."""
    choice = draw(SamplingParams(temperature=temperature))
    p = (LOGITS.double() / temperature).softmax(0)
    counts = torch.bincount(choice.tokens_N, minlength=8).double()
    expected = p * counts.sum()
    assert ((counts - expected) ** 2 / expected).sum() < 24.32
    torch.testing.assert_close(choice.logprobs_N.double(), p.log()[choice.tokens_N], atol=1e-5, rtol=0)


def test_filters_leave_tokens_out_and_log_probs_alone():
    """The update knows no filters: with log p after them, each importance weight would be the kept mass."""
    assert set(draw(SamplingParams(top_k=3)).tokens_N.tolist()) == {5, 0, 7}
    # p sorted: 5 (.53), 0 (.20), 7 (.12), 1 (.07): .53 + .20 < 0.8 <= .53 + .20 + .12, so the nucleus is {5, 0, 7}
    choice = draw(SamplingParams(top_p=0.8))
    assert set(choice.tokens_N.tolist()) == {5, 0, 7}
    for temperature in (1.0, 0.7):
        for filters in ({"top_p": 0.8}, {"top_k": 3}, {"top_p": 0.8, "top_k": 2}):
            choice = draw(SamplingParams(temperature=temperature, **filters))
            p = (LOGITS / temperature).softmax(0)
            torch.testing.assert_close(choice.logprobs_N, p.log()[choice.tokens_N], atol=1e-5, rtol=0)


def test_the_nucleus_ends_as_soon_as_it_reaches_top_p():
    logits = torch.tensor([[0.5, 0.25, 0.25]]).log()
    assert policy_scores(logits, SamplingParams(top_p=0.5)).isfinite().tolist() == [[True, False, False]]
    assert policy_scores(logits, SamplingParams(top_p=0.51)).isfinite().sum() == 2


def test_greedy_is_arg_max_with_log_prob_at_one():
    choice = draw(SamplingParams(temperature=0.0), count=3)
    assert choice.tokens_N.tolist() == [5, 5, 5]
    assert torch.allclose(choice.logprobs_N, LOGITS.log_softmax(0)[5])


def test_noise_depends_on_every_part_of_the_key():
    base = NoiseKey(0, 1, 2, 3)
    others = [base._replace(**{f: getattr(base, f) + 1}) for f in base._fields]
    assert len({stream_key(k) for k in (base, *others)}) == 5
    stream = torch.tensor([stream_key(base)] * 4)
    assert len({tuple(k) for k in row_keys(stream, torch.arange(4)).tolist()}) == 4


def test_a_choice_does_not_depend_on_its_batch():
    streams = torch.tensor([stream_key(NoiseKey(0, 0, 0, s)) for s in range(7)])
    keys = row_keys(streams, torch.arange(7))
    logits = torch.randn(7, 49152, generator=torch.Generator().manual_seed(0))
    together = choose(logits, keys, SamplingParams()).tokens_N
    alone = torch.cat([choose(logits[i : i + 1], keys[i : i + 1], SamplingParams()).tokens_N for i in range(7)])
    assert torch.equal(together, alone)


FILTERS = [
    SamplingParams(),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7),
    SamplingParams(top_p=0.6),
    SamplingParams(top_k=3),
    SamplingParams(top_k=3, top_p=0.6),
]


@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_choosing_without_a_host_sync_chooses_the_same(params):
    logits = torch.randn(400, 8, generator=torch.Generator().manual_seed(0))
    keys = row_keys(torch.full((400,), stream_key(NoiseKey(1, 2, 3, 4))), torch.arange(400))
    found, wanted = choose_no_sync(logits, keys, params), choose(logits, keys, params)
    assert torch.equal(found.tokens_N, wanted.tokens_N)
    torch.testing.assert_close(found.logprobs_N, wanted.logprobs_N, atol=1e-5, rtol=0)


@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_log_normalisers_are_those_without_filters_at_temperature_one(params):
    choice = draw(params, count=5)
    found = lognorms(LOGITS.expand(5, -1), choice, params)
    torch.testing.assert_close(found, LOGITS.logsumexp(0).expand(5), atol=1e-5, rtol=0)


def test_noise_keys_are_splitmix64() -> None:
    """Its published first outputs; a position's key is the output that many steps after its stream."""
    assert sampling.splitmix64(0) == 0xE220A8397B1DCDAF
    assert sampling.splitmix64(1234567) == 6457827717110365317
    expected = [sampling.splitmix64((1234567 + step * 0x9E3779B97F4A7C15) % 2**64) for step in range(3)]
    keys = row_keys(torch.full((3,), 1234567), torch.arange(1, 4)).view(torch.int64).flatten()
    assert [key % 2**64 for key in keys.tolist()] == expected


def test_no_other_use_shares_the_noise_of_a_run_s_steps() -> None:
    """RL and validation, as far as a run may get."""
    assert len(NoiseStep) == len(NoiseStep.__members__) > 3, "one number each"
    assert of_validation(0) < 0
    assert not [step for step in NoiseStep if of_validation(MOST_STEPS) <= step < 0 or 0 < step <= MOST_STEPS]
