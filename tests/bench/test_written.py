"""The shape of a workload, by hand."""

from pathlib import Path

import pytest
import torch

from bench.written import written
from conf.load import load
from tests.tlt_core.grpo.rollouts import scored
from tlt_core.items.store import save_scored
from tlt_core.items.types import FinishReason, NoiseKey, Rollout, RolloutBatch

# Tokens of the response, whether it was cut, seconds from the start to the end, reward.
RESPONSES = [
    ([5, 6, 7, 8, 5, 6, 7, 8, 5, 6], True, 10.0, 0.0),  # 7 grams, 4 different ones
    *(([9, 10, 11, 12], False, 4.0, 1.0) for _ in range(4)),
]


@pytest.fixture
def batch() -> RolloutBatch:
    rollouts = [
        Rollout(
            key=NoiseKey(0, 1, prompt, 0),
            tokens=torch.tensor([3, *tokens]).int(),
            prompt_len=1,
            logprobs=torch.zeros(len(tokens)),
            finish=FinishReason.LENGTH if cut else FinishReason.STOP,
            policy_version=0,
            worker=prompt % 2,
            started_s=100.0,
            finished_s=100.0 + end_s,
        )
        for prompt, (tokens, cut, end_s, _) in enumerate(RESPONSES)
    ]
    return RolloutBatch.pack(rollouts)


def test_what_is_written(batch: RolloutBatch, tmp_path: Path) -> None:
    cfg = load("conf/smoke.yaml", [f"output_dir={tmp_path}"])
    folder = cfg.run_dir / "steps" / "000001"
    folder.mkdir(parents=True)
    rewards = torch.tensor([reward for *_, reward in RESPONSES])
    save_scored(scored(batch, rewards), folder / "scored.safetensors")
    found = written(cfg)
    assert (found["length p50"], found["length max"]) == (4, 10)
    assert found["truncated"] == pytest.approx(0.2)
    assert found["rollout with at most 4 live"] == pytest.approx(0.6)  # five live for 4 s, then one for 6 s
    assert found["repeated 4-grams"] == pytest.approx(3 / 7 / 5)
    assert found["reward, longest tenth"] == 0.0
