"""Golden numbers of the loss, its gradient and its metrics, computed by hand."""

import math

import pytest
import torch
from torch import Tensor

from conf.update import AlgorithmConfig, KLConfig
from tlt_core.grpo.loss import TokenData, kl_estimate, loss_metrics, policy_loss, token_weights

ALGORITHM = AlgorithmConfig(clip_low=0.2, clip_high=0.28, dual_clip=3.0, tis_cap=2.0)


def _logs(*probabilities: float) -> Tensor:
    return torch.tensor(probabilities).log()


def _data(
    advantages: list[float], *, rollout: Tensor, old: Tensor | None = None, ref: Tensor | None = None
) -> TokenData:
    count = len(advantages)
    return TokenData(torch.tensor(advantages), torch.full((count,), 1 / count), rollout, old, ref)


def test_surrogate_by_hand() -> None:
    """Five tokens, old probability 0.1 everywhere, ratios 1, 1.5, 0.5, 1.5, 4; rollout agrees with old.

    token  A    ratio  -A r    -A clip(r)  loss term                       d loss / d logp (times 5)
    0      1    1      -1      -1          -1                              -A r = -1
    1      1    1.5    -1.5    -1.28       -1.28  (clipped)                0
    2     -1    0.5     0.5     0.8         0.8   (clipped)                0
    3     -1    1.5     1.5     1.28        1.5                            1.5
    4     -1    4       4       1.28        3     (dual clip)              0
    """
    logprobs = _logs(0.1, 0.15, 0.05, 0.15, 0.4).requires_grad_()
    old = _logs(0.1, 0.1, 0.1, 0.1, 0.1)
    terms = policy_loss(logprobs, torch.zeros(5), _data([1, 1, -1, -1, -1], rollout=old, old=old), algorithm=ALGORITHM)
    assert terms.loss.item() == pytest.approx((-1 - 1.28 + 0.8 + 1.5 + 3) / 5, abs=1e-6)
    terms.loss.backward()
    assert logprobs.grad.tolist() == pytest.approx([-0.2, 0, 0, 0.3, 0], abs=1e-6)
    metrics = loss_metrics(terms.sums_M, terms.largest)
    assert metrics["actor/pg_loss"] == pytest.approx(3.02 / 5, abs=1e-6)
    assert metrics["actor/pg_clipfrac"] == pytest.approx(2 / 5)
    assert metrics["actor/pg_clipfrac_lower"] == pytest.approx(1 / 5)
    assert metrics["actor/ppo_kl"] == pytest.approx(-math.log(1.5 * 0.5 * 1.5 * 4) / 5, abs=1e-6)


def test_on_policy_gradient_is_reinforce_times_the_truncated_weight() -> None:
    """Old = current: ratio 1, so d loss / d logp = -A min(p / q, 2) / n.  p/q: 0.5, 1, 4 (cut to 2)."""
    logprobs = _logs(0.1, 0.2, 0.4).requires_grad_()
    terms = policy_loss(logprobs, torch.zeros(3), _data([2, -1, 1], rollout=_logs(0.2, 0.2, 0.1)), algorithm=ALGORITHM)
    assert terms.loss.item() == pytest.approx((-2 * 0.5 + 1 - 1 * 2) / 3, abs=1e-6)
    terms.loss.backward()
    assert logprobs.grad.tolist() == pytest.approx([-2 * 0.5 / 3, 1 / 3, -2 / 3], abs=1e-6)
    assert loss_metrics(terms.sums_M, terms.largest)["training/tis_weight_mean"] == pytest.approx(3.5 / 3, abs=1e-6)


@pytest.mark.parametrize(
    ("kind", "value", "slope"),
    [
        ("k2", math.log(2) ** 2 / 2, math.log(2)),
        ("k3", 0.5 - 1 + math.log(2), 1 - 0.5),  # r = policy / reference = 2
    ],
)
def test_kl_in_loss_by_hand(kind: str, value: float, slope: float) -> None:
    logprobs = _logs(0.4).requires_grad_()
    assert kl_estimate(logprobs, _logs(0.2), kind=kind).item() == pytest.approx(value, abs=1e-6)
    algorithm = AlgorithmConfig(kl=KLConfig(kind=kind, coef=0.5))
    data = _data([1], rollout=_logs(0.4), ref=_logs(0.2))
    terms = policy_loss(logprobs, torch.zeros(1), data, algorithm=algorithm)
    assert terms.loss.item() == pytest.approx(-1 + 0.5 * value, abs=1e-6)
    terms.loss.backward()
    assert logprobs.grad.item() == pytest.approx(-1 + 0.5 * slope, abs=1e-6)
    assert loss_metrics(terms.sums_M, terms.largest)["actor/kl_loss"] == pytest.approx(value, abs=1e-6)


def test_kl_in_reward_adds_nothing_to_the_loss() -> None:
    algorithm = AlgorithmConfig(kl=KLConfig(kind="k1", coef=0.5, place="reward"))
    data = _data([1], rollout=_logs(0.4), ref=_logs(0.2))
    terms = policy_loss(_logs(0.4).requires_grad_(), torch.zeros(1), data, algorithm=algorithm)
    assert terms.loss.item() == pytest.approx(-1)


def test_token_weights_by_hand() -> None:
    lens = torch.tensor([2, 8])
    counts = {"num_tokens": 20, "num_sequences": 4, "max_new_tokens": 10}
    assert token_weights("token_mean", lens, **counts).tolist() == pytest.approx([1 / 20, 1 / 20])
    assert token_weights("sequence_mean", lens, **counts).tolist() == pytest.approx([1 / 8, 1 / 32])
    assert token_weights("constant", lens, **counts).tolist() == pytest.approx([1 / 40, 1 / 40])


def test_mismatch_metrics_against_numpy_style_formulas() -> None:
    p, q = torch.tensor([0.1, 0.5, 0.9, 0.3]), torch.tensor([0.15, 0.5, 0.8, 0.35])
    terms = policy_loss(
        p.log(), torch.tensor([1.0, 2, 3, 4]), _data([1, 1, 1, 1], rollout=q.log()), algorithm=ALGORITHM
    )
    metrics = loss_metrics(terms.sums_M, terms.largest)
    assert metrics["training/rollout_probs_diff_mean"] == pytest.approx(0.05, abs=1e-6)
    assert metrics["training/rollout_probs_diff_max"] == pytest.approx(0.1, abs=1e-6)
    assert metrics["training/rollout_actor_probs_pearson_corr"] == pytest.approx(
        torch.corrcoef(torch.stack([p, q]))[0, 1].item(), abs=1e-5
    )
    assert metrics["actor/entropy"] == pytest.approx(2.5)


def test_sums_add_up_over_micro_batches() -> None:
    generator = torch.Generator().manual_seed(0)
    logprobs, old, rollout, ref = (-3 * torch.rand(10, generator=generator) for _ in range(4))
    data = TokenData(torch.randn(10, generator=generator), torch.rand(10, generator=generator), rollout, old, ref)
    algorithm = AlgorithmConfig(kl=KLConfig(coef=0.1))
    whole = policy_loss(logprobs, torch.ones(10), data, algorithm=algorithm)
    parts = [
        policy_loss(logprobs[s], torch.ones(10)[s], TokenData(*(x[s] for x in data)), algorithm=algorithm)
        for s in (slice(0, 3), slice(3, 10))
    ]
    assert sum(p.loss.item() for p in parts) == pytest.approx(whole.loss.item(), abs=1e-6)
    torch.testing.assert_close(parts[0].sums_M + parts[1].sums_M, whole.sums_M)
    assert max(p.largest for p in parts) == whole.largest


def test_wildly_different_policies_stay_finite() -> None:
    logprobs = torch.tensor([-1e-3]).requires_grad_()
    data = _data([-1], rollout=torch.tensor([-300.0]), old=torch.tensor([-300.0]), ref=torch.tensor([-300.0]))
    terms = policy_loss(logprobs, torch.zeros(1), data, algorithm=AlgorithmConfig(kl=KLConfig(coef=0.1)))
    terms.loss.backward()
    assert terms.loss.isfinite()
    assert logprobs.grad.isfinite().all()
