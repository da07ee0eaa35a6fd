"""A scored batch of two groups of two, by hand."""

import torch

from tlt_core.items.types import FinishReason, NoiseKey, Rollout, RolloutBatch, ScoredBatch


def scored_batch() -> ScoredBatch:
    """Responses of 3, 5, 7 and 40 tokens; they end 1, 2, 3 and 9 s after second 1000."""
    lengths, ends_s = (3, 5, 7, 40), (1001.0, 1002.0, 1003.0, 1009.0)
    rollouts = [
        Rollout(
            key=NoiseKey(0, 1, index // 2, index % 2),
            tokens=torch.arange(length + 2, dtype=torch.int32),
            prompt_len=2,
            logprobs=torch.full((length,), -0.5),
            finish=FinishReason.STOP,
            policy_version=0,
            worker=index % 2,
            started_s=1000.0,
            finished_s=end_s,
        )
        for index, (length, end_s) in enumerate(zip(lengths, ends_s, strict=True))
    ]
    return ScoredBatch(
        rollouts=RolloutBatch.pack(rollouts),
        rewards_R=torch.tensor([1.0, 0.0, 1.0, 0.0]),
        scores_R=torch.tensor([1.0, 0.0, 1.0, 0.0]),
        components_RF=torch.tensor([[1.0], [0.0], [1.0], [0.0]]),
        status_R=torch.zeros(4, dtype=torch.int64),
        reward_s_R=torch.full((4,), 0.25),
        advantages_R=torch.tensor([1.0, -1.0, 1.0, -1.0]),
    )
