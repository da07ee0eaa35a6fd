"""The prompts of a run, and the tokenizer that turns responses into text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from tlt_core.data import dataset
from tlt_core.data.response_text import response_text
from tlt_core.items.types import Prompt
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
        """All prompts."""
        return {p.id: p for p in (*self.train, *self.validation)}

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(p.tokens) for p in self.by_id.values())

    def text(self, tokens: Tensor) -> str:
        """A response as rewards see it."""
        return response_text(self.tokenizer, tokens.tolist(), stop_token_ids=self.stop_token_ids)
