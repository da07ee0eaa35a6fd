"""The prompts of a run, and the scores and texts of the responses to them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tlt_core.data import dataset
from tlt_core.data.file_questions import ROW
from tlt_core.data.response_text import response_text
from tlt_core.grpo.reward import Score, Scorer
from tlt_core.items.types import FinishReason, Prompt, Rollout, RolloutBatch, ScoredBatch, ScoreStatus
from tlt_core.model.load import load_tokenizer, stop_token_ids


@dataclass(frozen=True)
class Prompts:
    """Training and validation prompts; ids are unique over both."""

    train: Sequence[Prompt]
    validation: Sequence[Prompt]
    tokenizer: Any
    stop_token_ids: tuple[int, ...]

    @classmethod
    def load(cls, data_dir: Path, model_dir: Path, *, num_prompts: int, stops: Sequence[int] = ()) -> "Prompts":
        """num_prompts: of one step.  stops: tokens that end a response besides the model's own.

        Raises DataError when the data set has fewer prompts.
        """
        tokenizer = load_tokenizer(model_dir)
        train = dataset.load(data_dir, "train", tokenizer)
        if len(train) < num_prompts:
            raise dataset.DataError(
                f"the data set has {len(train)} training prompts, rollout.num_prompts asks for {num_prompts} a step; "
                "lower it or provide more data"
            )
        validation = dataset.load(data_dir, "validation", tokenizer)
        return cls(train, validation, tokenizer, stop_token_ids(model_dir, tokenizer, also=stops))

    @property
    def by_id(self) -> Mapping[int, Prompt]:
        return {p.id: p for p in (*self.train, *self.validation)}

    @property
    def longest(self) -> int:
        return max(len(p.tokens) for p in self.by_id.values())

    def text(self, tokens: Tensor) -> str:
        """A response as rewards see it."""
        return response_text(self.tokenizer, tokens.tolist(), stop_token_ids=self.stop_token_ids)


class Scoring:
    def __init__(self, scorer: Scorer, prompts: Prompts) -> None:
        self._scorer, self._prompts, self._by_id = scorer, prompts, prompts.by_id
        self._scores: dict[tuple[int, int], Score] = {}  # of this step, as far as somebody has asked for them

    def begin_step(self) -> None:
        self._scores.clear()

    def submit(self, rollout: Rollout) -> None:
        """Start scoring.  A response with the same prompt and sample replaces the earlier one."""
        prompt = self._by_id[rollout.key.prompt_id]
        self._scores.pop((prompt.id, rollout.key.sample), None)
        text = self._prompts.text(rollout.completion)
        self._scorer.submit((prompt.id, rollout.key.sample), prompt, text, rollout.earned)

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
            **({"row": prompt.metadata[ROW]} if ROW in prompt.metadata else {}),
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
