"""What people see of a running step: live progress, and sampled responses as text."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tlt_core.types import FinishReason, Prompt, ScoredBatch, ScoreStatus, WorkerState


class Progress(NamedTuple):
    """What the terminal shows, several times a second."""

    step: int
    num_steps: int
    phase: str
    finished: int
    total: int
    live: int
    tokens: int
    tokens_per_s: float
    worker_states: tuple[WorkerState, ...]


def sample_rows(
    scored: ScoredBatch, count: int, *, prompts: Mapping[int, Prompt], decode: Callable[[Tensor], str]
) -> list[dict[str, Any]]:
    """`count` responses spread evenly over the batch, with prompt, text and scores."""
    rollouts, rows = scored.rollouts, []
    for index in torch.linspace(0, len(rollouts) - 1, min(count, len(rollouts))).long().tolist():
        prompt = prompts[int(rollouts.prompt_ids_R[index])]
        rows.append(
            {
                "prompt_id": prompt.id,
                "sample": int(rollouts.samples_R[index]),
                "task": prompt.task,
                "prompt": prompt.text,
                "response": decode(rollouts.completion(index)),
                "answer": prompt.answer,
                "reward": float(scored.rewards_R[index]),
                "status": ScoreStatus(int(scored.status_R[index])).name,
                "advantage": float(scored.advantages_R[index]),
                "num_tokens": int(rollouts.response_lens_R[index]),
                "finish": FinishReason(int(rollouts.finish_R[index])).name,
                "policy_version": int(rollouts.policy_version_R[index]),
            }
        )
    return rows
