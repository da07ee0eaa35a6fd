"""A trainer and made-up rollouts, shared by the tests of the update."""

import torch

from conf.update import AlgorithmConfig, UpdateConfig
from tlt_core.grpo.update import PolicyTrainer
from tlt_core.items.types import FinishReason, NoiseKey, Rollout, RolloutBatch, ScoredBatch
from tlt_core.model.decoder import Decoder

CPU = torch.device("cpu")


def make_trainer(
    decoder: Decoder,
    cfg: UpdateConfig,
    *,
    algorithm: AlgorithmConfig,
    temperature: float = 1.0,
    total_steps: int = 4,
    rank: int = 0,
    world_size: int = 1,
    device: torch.device = CPU,
) -> PolicyTrainer:
    return PolicyTrainer(
        decoder,
        cfg,
        algorithm=algorithm,
        total_steps=total_steps,
        max_new_tokens=30,
        temperature=temperature,
        rank=rank,
        world_size=world_size,
        device=device,
    )


def tiny_rollouts(*, seed: int, num_groups: int, num_samples: int = 3, episodes: bool = False) -> RolloutBatch:
    """Random tokens of uneven lengths with random log-probs; the last response of a group is cut.

    episodes: an environment says some of the tokens, never the last one."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    rollouts = []
    for prompt_id in range(num_groups):
        prompt = torch.randint(3, 64, (draw(2, 9),), generator=generator).int()
        for sample in range(num_samples):
            completion = torch.randint(3, 64, (draw(1, 25),), generator=generator).int()
            said = torch.rand(len(completion), generator=torch.Generator().manual_seed(len(completion))) < 0.4
            said[-1] = False
            rollouts.append(
                Rollout(
                    key=NoiseKey(0, 1, prompt_id, sample),
                    tokens=torch.cat([prompt, completion]),
                    prompt_len=len(prompt),
                    logprobs=-4 * torch.rand(len(completion), generator=generator) - 1,
                    finish=FinishReason.LENGTH if sample == num_samples - 1 else FinishReason.STOP,
                    policy_version=0,
                    sampled=~said if episodes else None,
                )
            )
    return RolloutBatch.pack(rollouts)


def scored(rollouts: RolloutBatch, advantages_R: torch.Tensor) -> ScoredBatch:
    """Rollouts with the given advantages; the other fields play no part in the update."""
    count = len(rollouts)
    return ScoredBatch(
        rollouts=rollouts,
        rewards_R=advantages_R.clone(),
        scores_R=advantages_R.clone(),
        components_RF=advantages_R[:, None].clone(),
        status_R=torch.zeros(count, dtype=torch.int64),
        reward_s_R=torch.zeros(count),
        advantages_R=advantages_R,
    )


def tiny_scored(*, seed: int, num_groups: int, num_samples: int = 3, episodes: bool = False) -> ScoredBatch:
    rollouts = tiny_rollouts(seed=seed, num_groups=num_groups, num_samples=num_samples, episodes=episodes)
    return scored(rollouts, torch.randn(len(rollouts), generator=torch.Generator().manual_seed(seed)))
