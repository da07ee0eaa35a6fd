"""A run ends where the rollout engine and the update compute probabilities of different policies."""

import math

import pytest
import torch

from conf.rollout import RolloutConfig, SpeculationConfig
from conf.update import AlgorithmConfig, UpdateConfig
from tests.decoders import lively
from tests.tlt_core.grpo.rollouts import make_trainer, scored
from tlt_core.grpo.batch import make_train_batches
from tlt_core.items.types import GenerationRequest, NoiseKey, RolloutBatch, SamplingParams
from tlt_core.model.decoder import Decoder
from tlt_core.rollout import build
from tlt_core.run.engine_agreement import DisagreementError, require_agreement

PLAIN = SpeculationConfig(policy="off")
T = 0.25  # at which the tiny model is as sure of its tokens as a language model
NAME = "training/rollout_probs_diff_mean"


def roll_out(decoder: Decoder) -> RolloutBatch:
    """Sixteen responses of the engine, on the C kernels where they run."""
    engine = build.make_engine(decoder, PLAIN, max_live=16, max_len=40, seed=0)
    keys = [NoiseKey(0, 1, prompt, sample) for prompt in range(4) for sample in range(4)]
    requests = [GenerationRequest(key, torch.arange(3, 8 + key.prompt_id).int()) for key in keys]
    return RolloutBatch.pack(engine.decode_all(requests, SamplingParams(temperature=T, max_new_tokens=24)))


def update_metrics(rollouts: RolloutBatch) -> dict[str, float]:
    update, algorithm = UpdateConfig(), AlgorithmConfig()
    batch = scored(rollouts, torch.randn(len(rollouts), generator=torch.Generator().manual_seed(0)))
    shares = make_train_batches(batch, update, algorithm, num_workers=1, seed=0, step=0)
    trainer = make_trainer(lively(), update, algorithm=algorithm, temperature=T)
    return trainer.steps([step[0] for step in shares])


def test_our_engine_agrees_with_the_update_and_one_that_missed_a_publish_ends_the_run() -> None:
    cfg = RolloutConfig(engine="builtin", dtype="bfloat16")
    right = update_metrics(roll_out(lively(dtype=torch.bfloat16)))
    assert 0 < right[NAME] < 0.02, "another type and other kernels: rounding"
    require_agreement(right, cfg)
    stale = lively(dtype=torch.bfloat16)
    with torch.no_grad():
        for layer in stale.layers:
            layer.down_proj.weight.mul_(0.5)
    wrong = update_metrics(roll_out(stale))
    for metrics in (wrong, {NAME: math.nan}):
        with pytest.raises(DisagreementError, match=r"max_probs_diff allows 0\.05.*TLT_NATIVE_KERNELS=0"):
            require_agreement(metrics, cfg)
    require_agreement({}, cfg)  # no update was made
    require_agreement({NAME: 0.3}, cfg.model_copy(update={"max_probs_diff": 0.3}))
