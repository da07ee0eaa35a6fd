"""The clipped policy-gradient loss, its KL term, and everything measured beside it.

    ratio   r_t = pi(a_t) / pi_old(a_t)
    l_t   = max(-A r_t, -A clip(r_t, 1 - clip_low, 1 + clip_high))       PPO's pessimistic surrogate, DAPO's clip-higher
            and for A < 0 at most -A dual_clip                            dual clip (Ye et al., arXiv 1912.09729)
    w_t   = min(pi_old(a_t) / pi_rollout(a_t), tis_cap)                  truncated importance sampling, a constant
    loss  = sum_t n_t (w_t l_t + coef KL_t)                              n_t: share of the token, see `token_weights`

Losses and measurements are *sums* over completion tokens, and a token's share refers to the whole optimizer step.  So
they add up exactly over micro-batches and workers, however the optimizer step is divided.

Shapes: C completion tokens, S sequences, M measurements.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from conf.update import AlgorithmConfig

KLKind = Literal["k1", "k2", "k3"]

_MAX_LOG_RATIO = 20.0  # exp(20) = 5e8: keeps float32 finite when two policies have nothing in common

# Columns of `LossTerms.sums_M`, each a sum over tokens.
_SUMS = (
    "tokens", "pg_loss", "kl_loss", "clipped", "clipped_lower", "ppo_kl", "entropy", "tis",
    "prob_diff", "p", "q", "pp", "qq", "pq",
)  # fmt: skip


class TokenData(NamedTuple):
    """What the loss needs about the completion tokens besides the current policy; all [C] float32."""

    advantages_C: Tensor
    weights_C: Tensor  # n_t of the module docstring
    rollout_logprobs_C: Tensor
    old_logprobs_C: Tensor | None  # None: the policy has not changed since, so old = current
    ref_logprobs_C: Tensor | None  # None: no KL term


class LossTerms(NamedTuple):
    loss: Tensor  # scalar
    sums_M: Tensor  # float64, columns `_SUMS`
    largest: Tensor  # float64 scalar, largest |p - q|
    finite_C: Tensor  # bool, the token's term of the loss is a finite number


def token_weights(
    aggregation: Literal["token_mean", "sequence_mean", "constant"],
    sampled_lens_S: Tensor,
    *,
    num_tokens: int,
    num_sequences: int,
    max_new_tokens: int,
) -> Tensor:
    """Share n_t of each token of a sequence in the loss, [S] float32.

    num_tokens, num_sequences: of the whole optimizer step, all workers together.  token_mean: 1 / num_tokens (DAPO);
    sequence_mean: 1 / (num_sequences length) (GRPO); constant: 1 / (num_sequences max_new_tokens) (Dr.GRPO).
    """
    if aggregation == "token_mean":
        return torch.full((len(sampled_lens_S),), 1.0 / num_tokens)
    if aggregation == "sequence_mean":
        return 1.0 / (num_sequences * sampled_lens_S.float())
    return torch.full((len(sampled_lens_S),), 1.0 / (num_sequences * max_new_tokens))


def kl_estimate(logprobs_C: Tensor, ref_logprobs_C: Tensor, *, kind: KLKind) -> Tensor:
    """Schulman's estimators of KL(policy || reference) from the policy's samples, with r = policy / reference:
    k1 = log r, k2 = (log r)^2 / 2, k3 = 1/r - 1 + log r.  (joschu.net/blog/kl-approx.html)"""
    log_ratio = (logprobs_C - ref_logprobs_C).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    if kind == "k1":
        return log_ratio
    if kind == "k2":
        return log_ratio.square() / 2
    return torch.expm1(-log_ratio) + log_ratio


def policy_loss(logprobs_C: Tensor, entropy_C: Tensor, data: TokenData, *, algorithm: AlgorithmConfig) -> LossTerms:
    """Loss of one micro-batch.  logprobs_C: current policy, float32, with gradient; entropy_C: measured only."""
    old_C = logprobs_C.detach() if data.old_logprobs_C is None else data.old_logprobs_C
    log_ratio_C = (logprobs_C - old_C).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    ratio_C, advantages_C = log_ratio_C.exp(), data.advantages_C
    plain_C = -advantages_C * ratio_C
    clipped_C = -advantages_C * ratio_C.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
    upper_C = torch.maximum(plain_C, clipped_C)
    bound_C = torch.where(advantages_C < 0, -advantages_C * algorithm.dual_clip, torch.inf)
    tis_C = torch.ones_like(old_C)
    if algorithm.tis_cap:
        tis_C = (old_C - data.rollout_logprobs_C).clamp(max=_MAX_LOG_RATIO).exp().clamp(max=algorithm.tis_cap)
    terms_C = tis_C * torch.minimum(upper_C, bound_C)
    kl_C = torch.zeros_like(terms_C)
    if data.ref_logprobs_C is not None:
        kl_C = kl_estimate(logprobs_C, data.ref_logprobs_C, kind=algorithm.kl.kind)
    kl_coef = algorithm.kl.coef if algorithm.kl.place == "loss" else 0.0
    losses_C = data.weights_C * (terms_C + kl_coef * kl_C)
    loss = losses_C.sum()
    with torch.no_grad():
        p, q = old_C.exp().double(), data.rollout_logprobs_C.exp().double()
        diff = (p - q).abs()
        ones = torch.ones_like(p)
        columns = (
            ones, data.weights_C * terms_C, data.weights_C * kl_C, clipped_C > plain_C, upper_C > bound_C,
            -log_ratio_C, entropy_C, tis_C, diff, p, q, p * p, q * q, p * q,
        )  # fmt: skip
        sums_M = torch.stack([column.detach().double().sum() for column in columns])
        largest = diff.max() if len(diff) else diff.new_zeros(())
        return LossTerms(loss, sums_M, largest, losses_C.isfinite())


def empty_sums() -> Tensor:
    return torch.zeros(len(_SUMS), dtype=torch.float64)


def loss_metrics(sums_M: Tensor, largest: Tensor, *, scale: float = 1.0) -> dict[str, float]:
    """Metrics of one optimizer step (verl's names) from the sums over its micro-batches and workers.

    pg_loss and kl_loss are aggregated as the loss is; all others are means over completion tokens.  The training/
    metrics compare probabilities: p of the policy before the optimizer step, computed here, and q recorded in rollout.
    scale: by which the losses' weights still have to be multiplied.
    """
    s = dict(zip(_SUMS, sums_M.tolist(), strict=True))
    n = max(s["tokens"], 1.0)
    spread = (s["pp"] - s["p"] ** 2 / n) * (s["qq"] - s["q"] ** 2 / n)
    # correlation is undefined for constant probabilities; report 1 if they are equal everywhere
    constant = 1.0 if s["prob_diff"] == 0 else 0.0
    correlation = (s["pq"] - s["p"] * s["q"] / n) / spread**0.5 if spread > 0 else constant
    return {
        "actor/pg_loss": scale * s["pg_loss"],
        "actor/kl_loss": scale * s["kl_loss"],
        "actor/pg_clipfrac": s["clipped"] / n,
        "actor/pg_clipfrac_lower": s["clipped_lower"] / n,
        "actor/ppo_kl": s["ppo_kl"] / n,
        "actor/entropy": s["entropy"] / n,
        "training/tis_weight_mean": s["tis"] / n,
        "training/rollout_probs_diff_mean": s["prob_diff"] / n,
        "training/rollout_probs_diff_max": float(largest),
        "training/rollout_actor_probs_pearson_corr": correlation,
    }
