"""The update as a whole: gradients against a direct computation, and that cuts of the work do not change the result."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from conf.optimizer import AdamWConfig, ConstantSchedule, DecaySchedule
from conf.update import AlgorithmConfig, KLConfig, UpdateConfig
from tests.decoders import lively
from tests.tlt_core.grpo.rollouts import make_trainer, scored, tiny_rollouts, tiny_scored
from tlt_core.grpo.batch import TrainBatch, make_supervised_batches, make_train_batches
from tlt_core.grpo.optimizer import learning_rate
from tlt_core.grpo.policy import FrozenPolicy
from tlt_core.grpo.update import PolicyTrainer, UpdateError
from tlt_core.model.decoder import Decoder

CPU = torch.device("cpu")
# eps far above rounding: an AdamW step is then a smooth function of the gradient and small differences stay small
OPTIMIZER = AdamWConfig(learning_rate=1e-2, eps=1e-3, weight_decay=0.1, max_grad_norm=0.3)
ALGORITHM = AlgorithmConfig()


def _trainer(*, algorithm: AlgorithmConfig = ALGORITHM, dtype=torch.float32, **update) -> PolicyTrainer:
    cfg = UpdateConfig(**{"optimizer": OPTIMIZER} | update)
    return make_trainer(lively(dtype=dtype), cfg, algorithm=algorithm, temperature=0.7)


def _shares(*, seed: int = 0, algorithm=ALGORITHM, ref: bool = False, episodes: bool = False, **update) -> list:
    batch = tiny_scored(seed=seed, num_groups=4, episodes=episodes)
    reference = batch.rollouts.logprobs_T - 0.3 if ref else None
    return make_train_batches(
        batch, UpdateConfig(**update), algorithm, num_workers=1, seed=0, step=0, ref_logprobs_T=reference
    )


def _weights(trainer: PolicyTrainer) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in trainer.weights()}


def _assert_equal(a: dict, b: dict, *, atol: float) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=atol)


def _sequence_logprobs(decoder: Decoder, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
    """Log-probs of tokens 1.. of one sequence, by plain full attention and a plain log-softmax."""

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("thd,shd->hts", q, k) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
        return torch.einsum("hts,shd->thd", scores.softmax(-1), v)

    hidden = decoder(tokens[:-1], torch.arange(len(tokens) - 1), attend).last_TD
    logp = (F.linear(hidden, decoder.head_weight) / temperature).log_softmax(-1)
    return logp.gather(-1, tokens[1:, None].long()).squeeze(-1)


@pytest.mark.parametrize("episodes", [False, True])
def test_update_against_a_direct_computation(episodes: bool) -> None:
    """The whole chain (packing, log-probs, GRPO loss with sequence mean, TIS and k3, clip, AdamW) against a loop over
    unpacked sequences written from the formulas.  What an environment has said is read, and is no target."""
    algorithm = AlgorithmConfig(loss_aggregation="sequence_mean", kl=KLConfig(kind="k3", coef=0.2), tis_cap=2.0)
    share: TrainBatch = _shares(algorithm=algorithm, ref=True, episodes=episodes)[0][0]
    assert bool(share.sampled_C.all()) != episodes
    trainer = _trainer(algorithm=algorithm, tokens_per_micro_batch=64)
    metrics = trainer.step(share)

    decoder = lively()
    total, first = torch.zeros(()), 0
    for s in range(len(share)):
        tokens = share.tokens_T[share.offsets_S1[s] : share.offsets_S1[s + 1]]
        logp = _sequence_logprobs(decoder, tokens, 0.7)[share.prompt_lens_S[s] - 1 :]
        span = slice(first, first + len(logp))
        first = span.stop
        weight = (logp.detach() - share.rollout_logprobs_C[span]).exp().clamp(max=2.0)
        surrogate = -share.advantages_S[s] * weight * (logp - logp.detach()).exp()
        log_r = logp - share.ref_logprobs_C[span]
        terms = surrogate + 0.2 * (1 / log_r.exp() - 1 + log_r)
        total = total + terms[share.sampled_C[span]].mean() / share.num_sequences
    total.backward()
    norm = torch.stack([p.grad.norm() for p in decoder.parameters()]).norm()
    assert norm > OPTIMIZER.max_grad_norm
    assert metrics["actor/grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    got = _weights(trainer)
    with torch.no_grad():
        for name, p in decoder.named_parameters():
            g = p.grad * OPTIMIZER.max_grad_norm / norm
            # first AdamW step: m / (1 - b1) = g and v / (1 - b2) = g^2
            decay = OPTIMIZER.weight_decay if p.ndim > 1 else 0.0
            want = p * (1 - OPTIMIZER.learning_rate * decay) - OPTIMIZER.learning_rate * g / (g.abs() + OPTIMIZER.eps)
            torch.testing.assert_close(got[name], want, rtol=0, atol=2e-6)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
def test_micro_batches_add_up_to_one_big_batch(aggregation: str) -> None:
    algorithm = AlgorithmConfig(loss_aggregation=aggregation)
    share = _shares(algorithm=algorithm, episodes=True)[0][0]
    results = []
    for budget, checkpointing in ((4096, False), (4096, True), (64, False)):  # one pass; recomputed; several
        trainer = _trainer(algorithm=algorithm, tokens_per_micro_batch=budget, activation_checkpointing=checkpointing)
        results.append((trainer.step(share), _weights(trainer)))
    (metrics, weights), *others = results
    for other_metrics, other_weights in others:
        _assert_equal(weights, other_weights, atol=1e-6)
        assert other_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6)


def test_packed_logprobs_equal_one_by_one() -> None:
    share = _shares()[0][0]
    packed = _trainer().logprobs(share)
    decoder = lively()
    alone = [
        _sequence_logprobs(decoder, share.tokens_T[share.offsets_S1[s] : share.offsets_S1[s + 1]], 0.7)[
            share.prompt_lens_S[s] - 1 :
        ]
        for s in range(len(share))
    ]
    torch.testing.assert_close(packed, torch.cat(alone), rtol=0, atol=1e-5)
    frozen = FrozenPolicy(lively(), temperature=0.7, token_budget=64, device=CPU)
    torch.testing.assert_close(frozen.logprobs(share), packed, rtol=0, atol=1e-5)


def test_sequences_without_advantage_are_measured_but_not_trained_on() -> None:
    """Skipping their backward changes nothing: same update as with a KL term of weight zero, which forbids skipping."""
    rollouts = tiny_rollouts(seed=0, num_groups=4)
    advantages = torch.where(rollouts.prompt_ids_R < 2, torch.randn(12, generator=torch.Generator().manual_seed(0)), 0)
    share = make_train_batches(scored(rollouts, advantages), UpdateConfig(), ALGORITHM, num_workers=1, seed=0, step=0)[
        0
    ][0]
    skipping, thorough = _trainer(), _trainer(algorithm=AlgorithmConfig(kl=KLConfig(coef=1.0)))  # no reference: no term
    metrics = [trainer.step(share) for trainer in (skipping, thorough)]
    _assert_equal(_weights(skipping), _weights(thorough), atol=1e-6)
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-4, abs=1e-6)


def test_several_steps_use_the_log_probs_of_before_the_first() -> None:
    batches = [step[0] for step in _shares(num_minibatches=2, num_epochs=2)]
    together, alone = _trainer(), _trainer()
    metrics = together.steps(batches)
    before = {id(b): alone.logprobs(b) for b in batches}
    by_hand = [alone.step(replace(b, old_logprobs_C=before[id(b)])) for b in batches]
    _assert_equal(_weights(together), _weights(alone), atol=0)
    assert metrics["actor/pg_loss"] == pytest.approx(sum(m["actor/pg_loss"] for m in by_hand) / 4)
    assert by_hand[0]["actor/ppo_kl"] == pytest.approx(0, abs=1e-6)
    assert abs(by_hand[-1]["actor/ppo_kl"]) > 1e-4  # the policy has moved
    assert together.steps([]) == {}


@pytest.mark.parametrize(("dtype", "checkpointing"), [(torch.float32, False), (torch.bfloat16, True)])
def test_resume_is_bitwise(tmp_path: Path, dtype: torch.dtype, checkpointing: bool) -> None:
    shares = [_shares(seed=seed)[0][0] for seed in range(4)]
    straight = _trainer(dtype=dtype, activation_checkpointing=checkpointing)
    for index, share in enumerate(shares):
        if index == 2:
            straight.save(tmp_path)
        straight.step(share)
    resumed = _trainer(dtype=dtype, activation_checkpointing=checkpointing)
    resumed.load(tmp_path)
    assert resumed.completed_steps == 2
    for share in shares[2:]:
        resumed.step(share)
    _assert_equal(straight.state_dict(), resumed.state_dict(), atol=0)
    _assert_equal(_weights(straight), _weights(resumed), atol=0)


def test_bf16_keeps_small_updates_in_its_float32_masters() -> None:
    """A learning rate below half a bf16 ulp of the weights moves the masters, and after enough steps the weights."""
    optimizer = AdamWConfig(learning_rate=1e-5)
    trainer = _trainer(dtype=torch.bfloat16, optimizer=optimizer)
    start = {name: value.clone() for name, value in trainer.state_dict().items()}
    share = _shares()[0][0]
    for _ in range(3):
        trainer.step(share)
    state = trainer.state_dict()
    name = "master/decoder.layers.0.input_norm.weight"  # ones: half an ulp is 2^-9 below 1
    assert (state[name] != start[name]).all()
    weights = _weights(trainer)
    assert all(weight.dtype == torch.bfloat16 for weight in weights.values())
    assert (weights["layers.0.input_norm.weight"] == 1).all()
    torch.testing.assert_close(weights["norm.weight"].float(), state["master/decoder.norm.weight"], rtol=2**-8, atol=0)


def test_supervised_step_is_the_mean_cross_entropy_and_learns() -> None:
    generator = torch.Generator().manual_seed(0)
    examples = [
        (torch.randint(3, 64, (4,), generator=generator).int(), torch.randint(3, 64, (n,), generator=generator).int())
        for n in (3, 9, 1, 7)
    ]
    share = make_supervised_batches(examples, tokens_per_step=1000, num_workers=1, seed=0)[0][0]
    trainer = _trainer(tokens_per_micro_batch=64)
    expected = -trainer.logprobs(share).mean().item()
    losses = [trainer.supervised_step(share)["coldstart/loss"] for _ in range(30)]
    assert losses[0] == pytest.approx(expected, rel=1e-5)
    assert losses[-1] < losses[0] / 2


def test_learning_rate_schedule_by_hand() -> None:
    constant = AdamWConfig(learning_rate=1.0, schedule=ConstantSchedule(warmup_steps=4))
    assert [learning_rate(constant, s, total_steps=9) for s in (0, 1, 3, 4, 8)] == [0.25, 0.5, 1, 1, 1]
    linear = AdamWConfig(learning_rate=1.0, schedule=DecaySchedule(kind="linear", warmup_steps=2, final_fraction=0.5))
    assert [learning_rate(linear, s, total_steps=12) for s in (2, 7, 12, 99)] == [1, 0.75, 0.5, 0.5]
    cosine = AdamWConfig(learning_rate=1.0, schedule=DecaySchedule(kind="cosine"))
    assert learning_rate(cosine, 3, total_steps=12) == pytest.approx((1 + math.cos(math.pi / 4)) / 2)


@pytest.mark.parametrize("damage", ["missing", "nan"])
def test_a_state_of_another_model_or_with_a_nan_is_refused(damage: str, tmp_path: Path) -> None:
    trainer, name = _trainer(), "master/decoder.norm.weight"
    state = {key: value.clone() for key, value in trainer.state_dict().items()}
    if damage == "nan":
        state[name][3] = torch.nan
    else:
        del state[name]
    before = _weights(trainer)
    with pytest.raises(UpdateError, match=r"decoder\.norm\.weight"):
        trainer.load_state_dict(state)
    _assert_equal(_weights(trainer), before, atol=0)
    trainer.state_dict()[name][3] = torch.inf  # a view of the live weights
    for use in (lambda: trainer.save(tmp_path), lambda: list(trainer.weights())):
        with pytest.raises(UpdateError, match=r"norm\.weight holds NaN or infinite numbers"):
            use()
    assert not list(tmp_path.iterdir())


def _spoilt(share: TrainBatch, *sequences: int) -> TrainBatch:
    """As a reward that is infinite in float32 would leave it."""
    advantages_S = share.advantages_S.clone()
    advantages_S[list(sequences)] = torch.inf
    return replace(share, advantages_S=advantages_S)


def test_a_gradient_that_is_not_finite_skips_the_step_and_names_the_responses(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The policy, its moments and the schedule go on as if the step had not been."""
    good = [_shares(seed=seed)[0][0] for seed in range(2)]
    bad = _spoilt(good[1], 2, 5)
    trainer, undisturbed = _trainer(), _trainer()
    for share in good:
        undisturbed.step(share)
    trainer.step(good[0])
    assert trainer.steps([bad]) == {}
    assert trainer.completed_steps == 1
    names = [f"sample {int(bad.samples_S[s])} of prompt {int(bad.prompt_ids_S[s])}" for s in (2, 5)]
    assert f"no finite loss for {', '.join(names)})" in caplog.text
    assert trainer.steps([good[1]])["actor/grad_norm"] > 0
    _assert_equal(trainer.state_dict(), undisturbed.state_dict(), atol=0)


def test_three_skipped_steps_in_a_row_end_the_run() -> None:
    good = _shares()[0][0]
    bad, trainer = _spoilt(good, 0), _trainer()
    for share in (bad, bad, good, bad, bad):  # the good one starts the count anew
        trainer.step(share)
    with pytest.raises(UpdateError, match=r"sample \d+ of prompt \d+.*3\. such step in a row"):
        trainer.step(bad)
