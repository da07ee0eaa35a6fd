"""Group-relative advantages, and the shaping of rewards before them.

Means and deviations are float64.  A group of equal rewards has advantages of exactly 0, never rounding noise divided by
a tiny deviation.  Shapes: R responses, G groups (distinct prompts), T tokens of all responses.
"""

from typing import NamedTuple, assert_never

import torch
from torch import Tensor

from conf.update import Estimator, KLConfig
from tlt_core.grpo.loss import kl_estimate
from tlt_core.items.types import RolloutBatch

# Added to a deviation before dividing by it.  Rewards are float32 sums of terms of about 1, so their rounding is 1e-7
# to 1e-6, and differences that mean something are 1e-3 and more: noise must not become an advantage of about 1.
_EPS = 1e-4


class _Groups(NamedTuple):
    centred_R: Tensor  # float64, reward minus the group's mean; exactly 0 where the group is uniform
    std_R: Tensor  # float64, unbiased deviation of the response's group; 0 in groups of one
    size_R: Tensor  # float64, responses in the group
    varied_R: Tensor  # bool, the group's rewards are not all equal


def advantages(rewards_R: Tensor, prompt_ids_R: Tensor, *, kind: Estimator) -> Tensor:
    """Advantages, [R] float32.  Responses with the same prompt id form a group, in any order.

    grpo: (r - mean) / std (Shao et al., arXiv 2402.03300); dr_grpo: r - mean (Liu et al., arXiv 2503.20783);
    rloo: r - mean of the others (Ahmadian et al., arXiv 2402.14740); reinforce_pp_baseline: r - mean, over the std of
    the whole batch (Hu, arXiv 2501.03262).
    """
    groups = _group(rewards_R, prompt_ids_R)
    if kind == "grpo":
        result = groups.centred_R / (groups.std_R + _EPS)
    elif kind == "dr_grpo":
        result = groups.centred_R
    elif kind == "rloo":
        # r - (n mean - r) / (n - 1)  =  (r - mean) n / (n - 1)
        result = groups.centred_R * groups.size_R / (groups.size_R - 1).clamp(min=1)
    elif kind == "reinforce_pp_baseline":
        std = groups.centred_R.std() if len(rewards_R) > 1 else torch.zeros(())
        result = groups.centred_R / (std + _EPS)
    else:
        assert_never(kind)
    return result.float()


def informative(scores_R: Tensor, prompt_ids_R: Tensor) -> Tensor:
    """True where the group's scores differ: what DAPO's dynamic sampling keeps.  [R] bool."""
    return _group(scores_R, prompt_ids_R).varied_R


def overlong_penalty(response_lens_R: Tensor, *, max_new_tokens: int, buffer_tokens: int, penalty: float) -> Tensor:
    """DAPO's soft overlong punishment (Yu et al., arXiv 2503.14476, eq. 13); subtract it from the rewards.

    0 up to max_new_tokens - buffer_tokens, then linear up to `penalty` at max_new_tokens.  [R] float32, >= 0.
    """
    if buffer_tokens == 0:
        return torch.zeros(len(response_lens_R))
    excess_R = response_lens_R - (max_new_tokens - buffer_tokens)
    return (excess_R / buffer_tokens).clamp(0, 1).float() * penalty


def kl_penalty(rollouts: RolloutBatch, ref_logprobs_T: Tensor, *, kl: KLConfig) -> Tensor:
    """What `kl.place: reward` subtracts from the rewards: coef * sum of the estimate over the response, [R] float32.

    ref_logprobs_T: the reference's log-probabilities, aligned with rollouts.tokens_T (only sampled tokens count).
    """
    index_T = torch.repeat_interleave(torch.arange(len(rollouts)), rollouts.lengths_R)
    estimate_T = kl_estimate(rollouts.logprobs_T, ref_logprobs_T, kind=kl.kind).masked_fill(~rollouts.sampled_T, 0)
    return kl.coef * torch.zeros(len(rollouts)).index_add_(0, index_T, estimate_T)


def _group(rewards_R: Tensor, prompt_ids_R: Tensor) -> _Groups:
    rewards = rewards_R.double()
    _, group_R, size_G = torch.unique(prompt_ids_R, return_inverse=True, return_counts=True)
    zeros_G = torch.zeros(len(size_G), dtype=torch.float64)
    low_G = zeros_G.scatter_reduce(0, group_R, rewards, "amin", include_self=False)
    high_G = zeros_G.scatter_reduce(0, group_R, rewards, "amax", include_self=False)
    varied_R = (high_G > low_G)[group_R]
    mean_G = zeros_G.index_add(0, group_R, rewards) / size_G
    centred_R = torch.where(varied_R, rewards - mean_G[group_R], 0.0)
    variance_G = zeros_G.index_add(0, group_R, centred_R.square()) / (size_G - 1).clamp(min=1)
    return _Groups(centred_R, variance_G.sqrt()[group_R], size_G[group_R].double(), varied_R)
