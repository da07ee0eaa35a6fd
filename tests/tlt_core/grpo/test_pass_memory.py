"""The arithmetic of a pass's memory, against torch's own count of a pass that is computed."""

import gc

import pytest
import torch

from conf.update import UpdateConfig
from kernels.sampling import token_logprob
from tlt_core.grpo import pass_memory
from tlt_core.grpo.pass_memory import LiveBytes, pass_bytes
from tlt_core.grpo.policy import PolicyModel
from tlt_core.model.load import random_decoder
from tlt_core.model.shapes import shape

SHAPE = shape("llama", 512, 64, 192, 4, 4, 2, tied=True)
LENGTH, RESPONSES = 64, 8


def _computed(cfg: UpdateConfig) -> int:
    """Most bytes alive in a pass on the CPU, besides weights; gradients go as soon as they exist."""
    decoder = random_decoder(SHAPE, seed=0, dtype=torch.float32)
    model = PolicyModel(decoder, temperature=1.0, activation_checkpointing=cfg.activation_checkpointing)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(pass_memory._forget_gradient)
    count = LENGTH * RESPONSES
    offsets, places = torch.arange(RESPONSES + 1) * LENGTH, torch.arange(count)
    gc.collect()
    with LiveBytes(torch.device("cpu")) as live:
        logprobs, _ = model(places % 512, places % LENGTH, offsets, None, offsets, places, places % 512)
        logprobs.sum().backward()
    return live.peak


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_pass_takes_what_the_arithmetic_says(checkpointing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = UpdateConfig(
        tokens_per_micro_batch=LENGTH * RESPONSES, activation_checkpointing=checkpointing, dtype="float32"
    )
    monkeypatch.setattr(pass_memory, "CHUNK_ELEMENTS", LENGTH * RESPONSES * 512)  # one chunk: the pass is small
    monkeypatch.setattr(token_logprob, "_CACHED_ELEMENTS", 512)
    assert pass_bytes(SHAPE, cfg, sequence=LENGTH) == pytest.approx(_computed(cfg), rel=0.1)
