"""Responses to scores and texts: joins the scoring processes, the prompts and the tokenizer."""

from typing import Any

import torch

from tlt_core.grpo.reward import Score, Scorer
from tlt_core.items.types import FinishReason, Rollout, RolloutBatch, ScoredBatch, ScoreStatus
from tlt_core.run.prompts import Prompts


class Scoring:
    """`submit` every response as it ends, `collect` a batch of them."""

    def __init__(self, scorer: Scorer, prompts: Prompts) -> None:
        self._scorer, self._prompts = scorer, prompts
        self._by_id = prompts.by_id
        self._scores: dict[tuple[int, int], Score] = {}  # of this step, as far as somebody has asked for them

    def begin_step(self) -> None:
        """Forget the scores of the last step."""
        self._scores.clear()

    def submit(self, rollout: Rollout) -> None:
        """Start scoring.  A response with the same prompt and sample replaces the earlier one."""
        prompt = self._by_id[rollout.key.prompt_id]
        self._scores.pop((prompt.id, rollout.key.sample), None)
        self._scorer.submit((prompt.id, rollout.key.sample), prompt, self._prompts.text(rollout.completion))

    def is_ready(self, rollouts: RolloutBatch, *, within_s: float = 0.0) -> bool:
        """Would `collect` return at once?  Waits up to `within_s` for it."""
        return self._scorer.is_ready([k for k in _keys(rollouts) if k not in self._scores], within_s=within_s)

    def collect(self, rollouts: RolloutBatch) -> list[Score]:
        """Scores in the order of the responses; waits for them.  They can be asked for again until the step ends."""
        keys = _keys(rollouts)
        wanted = [key for key in keys if key not in self._scores]
        self._scores |= zip(wanted, self._scorer.collect(wanted), strict=True)
        return [self._scores[key] for key in keys]

    def if_ready(self, rollouts: RolloutBatch) -> list[Score] | None:
        """What `collect` returns; None while some scores are outstanding."""
        return self.collect(rollouts) if self.is_ready(rollouts) else None

    def sample_texts(self, scored: ScoredBatch, count: int) -> list[dict[str, Any]]:
        """`count` responses spread evenly over the batch, as rows for people to read."""
        chosen = torch.linspace(0, len(scored.rollouts) - 1, min(count, len(scored.rollouts))).long()
        return [self._row(scored, index) for index in chosen.tolist()]

    def _row(self, scored: ScoredBatch, index: int) -> dict[str, Any]:
        rollouts = scored.rollouts
        prompt = self._by_id[int(rollouts.prompt_ids_R[index])]
        return {
            "prompt_id": prompt.id,
            "sample": int(rollouts.samples_R[index]),
            "task": prompt.task,
            "prompt": prompt.text,
            "response": self._prompts.text(rollouts.completion(index)),
            "answer": prompt.answer,
            "reward": float(scored.rewards_R[index]),
            "status": ScoreStatus(int(scored.status_R[index])).name,
            "advantage": float(scored.advantages_R[index]),
            "num_tokens": int(rollouts.response_lens_R[index]),
            "finish": FinishReason(int(rollouts.finish_R[index])).name,
            "policy_version": int(rollouts.policy_version_R[index]),
        }


def _keys(rollouts: RolloutBatch) -> list[tuple[int, int]]:
    return list(zip(rollouts.prompt_ids_R.tolist(), rollouts.samples_R.tolist(), strict=True))
