"""Advantages and reward shaping, against numbers computed by hand."""

import math
from typing import get_args

import pytest
import torch

from conf.update import AlgorithmConfig, Estimator, KLConfig
from tests.tlt_core.grpo.rollouts import tiny_rollouts
from tlt_core.grpo.advantage import advantages, kl_penalty, overlong_penalty

# Group 7: 1, 0, 0, 1 (mean 1/2, unbiased std sqrt(1/3)); group 3: 2, 5 (mean 3.5, std sqrt(4.5)); group 9: all 0.1.
REWARDS = torch.tensor([1.0, 2.0, 0.0, 0.1, 0.0, 5.0, 1.0, 0.1, 0.1])
PROMPTS = torch.tensor([7, 3, 7, 9, 7, 3, 7, 9, 9])
CENTRED = [0.5, -1.5, -0.5, 0, -0.5, 1.5, 0.5, 0, 0]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("grpo", [0.865875, -0.707073, -0.865875, 0, -0.865875, 0.707073, 0.865875, 0, 0]),  # c / (std + 1e-4)
        ("dr_grpo", CENTRED),
        ("rloo", [2 / 3, -3, -2 / 3, 0, -2 / 3, 3, 2 / 3, 0, 0]),  # (r - mean) n / (n - 1)
        ("reinforce_pp_baseline", [c / (math.sqrt(5.5 / 8) + 1e-4) for c in CENTRED]),  # squares sum to 5.5, 9 values
    ],
)
def test_by_hand(kind: str, expected: list[float]) -> None:
    got = advantages(REWARDS, PROMPTS, kind=kind)
    assert got.dtype == torch.float32
    assert got.tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo", "reinforce_pp_baseline"])
@pytest.mark.parametrize("reward", [0.1, 1 / 3, -7.3])
def test_uniform_rewards_give_exactly_zero(kind: str, reward: float) -> None:
    """Eight times 0.1 has a mean that is not 0.1 in floating point; divided by a tiny std it would be of order 1."""
    got = advantages(torch.full((8,), reward), torch.zeros(8, dtype=torch.int64), kind=kind)
    assert got.tolist() == [0.0] * 8


@pytest.mark.parametrize("kind", get_args(Estimator))
def test_what_needs_all_groups_says_so(kind: Estimator) -> None:
    """A group's advantages with the rewards of the others, and with other ones."""
    others = torch.where(PROMPTS == 7, REWARDS, REWARDS * 3)
    found, again = (advantages(rewards, PROMPTS, kind=kind)[PROMPTS == 7] for rewards in (REWARDS, others))
    assert AlgorithmConfig(advantage=kind).needs_all_groups == (not torch.equal(found, again))


@pytest.mark.parametrize("kind", ["grpo", "reinforce_pp_baseline"])
def test_rounding_noise_is_no_advantage(kind: str) -> None:
    """1e-6 is a few roundings of a float32; a difference of 0.01 is meant."""
    noise = advantages(torch.tensor([1.0] * 7 + [1.000001]), torch.zeros(8, dtype=torch.int64), kind=kind)
    meant = advantages(torch.tensor([1.0] * 7 + [1.01]), torch.zeros(8, dtype=torch.int64), kind=kind)
    assert 0 < noise[-1] < 0.01
    assert meant[-1] > 2.4


def test_group_of_one_is_zero() -> None:
    assert advantages(torch.tensor([3.0]), torch.tensor([0]), kind="reinforce_pp_baseline").tolist() == [0.0]


def test_overlong_penalty_by_hand() -> None:
    lengths = torch.tensor([10, 80, 81, 90, 100])
    got = overlong_penalty(lengths, max_new_tokens=100, buffer_tokens=20, penalty=0.5)
    assert got.tolist() == pytest.approx([0, 0, 0.025, 0.25, 0.5])
    assert overlong_penalty(lengths, max_new_tokens=100, buffer_tokens=0, penalty=0.5).tolist() == [0] * 5


def test_kl_in_reward_sums_over_the_response_only() -> None:
    rollouts = tiny_rollouts(seed=0, num_groups=2)
    reference_T = rollouts.logprobs_T - 0.5  # on prompts too: it must not count there
    got = kl_penalty(rollouts, reference_T, kl=KLConfig(kind="k1", coef=0.2, place="reward"))
    assert got.tolist() == pytest.approx([0.2 * 0.5 * n for n in rollouts.response_lens_R.tolist()], rel=1e-5)
