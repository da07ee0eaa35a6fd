"""One update of the demo's model beside transformers and plain autograd in float64: the same gradient, to float32
rounding.  In float32 transformers itself is up to 6.5e-5 away from its float64 gradient, ours 9e-6."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from conf.update import AlgorithmConfig, UpdateConfig
from tests.tlt_core.grpo.rollouts import make_trainer, scored
from tlt_core.grpo.batch import make_train_batches
from tlt_core.items.types import FinishReason, NoiseKey, Rollout, RolloutBatch
from tlt_core.model.load import load_decoder

PROMPTS = ("How many letters has the word tail?", "What is 17 + 25, in words?")
RESPONSES = ("Four.", "It has four letters: t, a, i, l.", "Five", "42", "Forty-two", "17 + 25 = 42, so forty-two.")
ADVANTAGES = (0.5, 0.25, -0.75, 0.1, -0.6, 0.5)
TEMPERATURE = 0.8


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
def test_the_gradient_is_that_of_transformers(embedded_model: Path, tmp_path: Path, aggregation: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(embedded_model)
    theirs = AutoModelForCausalLM.from_pretrained(embedded_model, dtype=torch.float64, attn_implementation="eager")
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    answers = [tokenizer.encode(text) for text in RESPONSES]

    loss, rollouts, tokens = torch.zeros((), dtype=torch.float64), [], sum(map(len, answers))
    for i, (answer, advantage) in enumerate(zip(answers, ADVANTAGES, strict=True)):
        ids = torch.tensor(prompts[i // 3] + answer)
        logits = theirs(ids[None]).logits[0, len(ids) - len(answer) - 1 : -1]
        logp = (logits / TEMPERATURE).log_softmax(-1).gather(-1, ids[-len(answer) :, None])[:, 0]
        weight = {"token_mean": 1 / tokens, "sequence_mean": 1 / (6 * len(answer)), "constant": 1 / (6 * 30)}
        loss = loss - advantage * (logp - logp.detach()).exp().sum() * weight[aggregation]
        rollouts.append(
            Rollout(
                key=NoiseKey(0, 1, i // 3, i % 3),
                tokens=ids.int(),
                prompt_len=len(ids) - len(answer),
                logprobs=logp.detach().float(),
                finish=FinishReason.STOP,
                policy_version=0,
            )
        )
    loss.backward()

    algorithm = AlgorithmConfig(loss_aggregation=aggregation)
    cfg = UpdateConfig(tokens_per_micro_batch=64)
    ours = load_decoder(embedded_model, dtype=torch.float32)
    trainer = make_trainer(ours, cfg, algorithm=algorithm, temperature=TEMPERATURE)
    batch = scored(RolloutBatch.pack(rollouts), torch.tensor(ADVANTAGES))
    ((share,),) = make_train_batches(batch, cfg, algorithm, num_workers=1, seed=0, step=0)
    backend, step, got = trainer._backend, trainer._backend.step, {}

    def keep(lr: float, scale: float) -> float:
        got.update({name: scale * total for group in backend._groups for name, total in group.views(group.sum)})
        return step(lr, scale)

    backend.step = keep
    metrics = trainer.step(share)

    with torch.no_grad():  # their gradient under our names
        for weight in theirs.parameters():
            weight.copy_(weight.grad)
    theirs.save_pretrained(tmp_path)
    wanted = dict(load_decoder(tmp_path, dtype=torch.float32).named_parameters())
    assert metrics["actor/grad_norm"] == pytest.approx(
        torch.stack([g.double().norm() for g in wanted.values()]).norm().item(), rel=1e-5
    )
    for name, gradient in wanted.items():
        assert (got[f"decoder.{name}"] - gradient).norm() <= 3e-5 * gradient.norm(), name
