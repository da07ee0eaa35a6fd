"""Adapters: only they train, and rollouts get merged weights under the decoder's own names."""

import pytest
import torch
from torch import Tensor, nn

from conf.optimizer import AdamWConfig
from conf.update import AlgorithmConfig, LoraConfig, UpdateConfig
from tests.decoders import lively
from tests.tlt_core.grpo.rollouts import make_trainer, tiny_scored
from tlt_core.grpo.batch import TrainBatch, make_train_batches
from tlt_core.grpo.lora import fuse_adapters, inject_adapters
from tlt_core.grpo.update import PolicyTrainer
from tlt_core.model.config import ModelError

LORA = LoraConfig(enabled=True, rank=4, alpha=8.0, target_modules=("qkv_proj", "down_proj"))


def _trainer(dtype: torch.dtype, lora: LoraConfig = LORA) -> PolicyTrainer:
    cfg = UpdateConfig(lora=lora, optimizer=AdamWConfig(learning_rate=1e-2))
    return make_trainer(lively(dtype=dtype), cfg, algorithm=AlgorithmConfig())


def _share() -> TrainBatch:
    batch = tiny_scored(seed=0, num_groups=3)
    return make_train_batches(batch, UpdateConfig(), AlgorithmConfig(), num_workers=1, seed=0, step=0)[0][0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_starts_as_the_base_model_and_trains_adapters_only(dtype: torch.dtype) -> None:
    base = {name: value.detach().clone() for name, value in lively(dtype=dtype).named_parameters()}
    trainer = _trainer(dtype)
    start = {name: value.clone() for name, value in trainer.weights()}
    assert list(start) == list(base)
    assert all(torch.equal(start[name], base[name]) for name in base)
    assert {name.split("/")[0] for name in trainer.state_dict()} == {"master", "exp_avg", "exp_avg_sq", "step"}
    assert all("lora_" in name for name in trainer.state_dict() if name != "step")
    for _ in range(2):
        trainer.step(_share())
    moved = {name for name, value in trainer.weights() if not torch.equal(value, base[name])}
    assert moved == {name for name in base if "qkv_proj" in name or "down_proj" in name}


def test_merged_weights_are_the_policy_that_was_trained() -> None:
    trainer, share = _trainer(torch.float32), _share()
    for _ in range(2):
        trainer.step(share)
    merged = lively()
    merged.load_weights(trainer.weights())
    plain = make_trainer(merged, UpdateConfig(), algorithm=AlgorithmConfig())
    torch.testing.assert_close(plain.logprobs(share), trainer.logprobs(share), rtol=0, atol=1e-4)


def test_resume_is_bitwise() -> None:
    share = _share()
    straight, resumed = _trainer(torch.float32), _trainer(torch.float32)
    straight.step(share)
    resumed.load_state_dict({name: value.clone() for name, value in straight.state_dict().items()})
    for trainer in (straight, resumed):
        trainer.step(share)
    for (name, a), (_, b) in zip(straight.weights(), resumed.weights(), strict=True):
        assert torch.equal(a, b), name


def test_unknown_target_is_refused() -> None:
    with pytest.raises(ModelError, match=r"q_proj.*down_proj"):
        _trainer(torch.float32, LoraConfig(enabled=True, target_modules=("q_proj",)))


@pytest.mark.parametrize("bias", [False, True])
def test_fused_adapters_compute_what_peft_does(bias: bool) -> None:
    """Outputs and gradients of a chain of two layers, the first of which gets an input that needs no gradient."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"qkv_proj": nn.Linear(6, 10, bias=bias), "down_proj": nn.Linear(10, 5, bias=bias)}).double()
    inject_adapters(model, LORA)
    trained = {name: p for name, p in model.named_parameters() if "lora_" in name}
    for parameter in trained.values():
        nn.init.normal_(parameter)
    x_STD = torch.randn(2, 3, 6, dtype=torch.float64)

    def results() -> list[Tensor]:
        out = model["down_proj"](model["qkv_proj"](x_STD).sin())
        return [out, *torch.autograd.grad(out.square().sum(), list(trained.values()))]

    expected = results()
    fuse_adapters(model)
    for ours, theirs in zip(results(), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert len(trained) == 4
