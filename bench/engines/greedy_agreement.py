"""Whether two engines decode the same model: their greedy tokens, and how near a tie was where they first differ.

Rounding differs between engines, so either of two almost equally likely tokens may win, and then another text follows.
After a wrong conversion, engines differ at tokens that are far from equally likely.
"""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import transformers

LogProbs = Callable[[Sequence[int]], torch.Tensor]  # tokens -> [V] of the next one


class Agreement(NamedTuple):
    """Agreement over all responses."""

    equal_tokens: float  # share of the reference's tokens before the first difference
    parted: int  # responses that differ
    largest_gap: float  # nats, at the first differences; 0 if there are none


def agreement(
    prompts: Sequence[Sequence[int]],
    reference: Sequence[Sequence[int]],
    theirs: Sequence[Sequence[int]],
    *,
    enders: Collection[int],
    log_probs: LogProbs,
) -> Agreement:
    """Compare.  enders: tokens that end a response.

    Tokens from the reference's first ender on do not count: with a fixed number of tokens, some engines forbid enders.
    """
    equal, total, gaps = 0, 0, []
    for prompt, ours, other in zip(prompts, reference, theirs, strict=True):
        length = next((i for i, token in enumerate(ours) if token in enders), len(ours))
        same = next((i for i in range(length) if ours[i] != other[i]), length)
        total, equal = total + length, equal + same
        if same < length:
            scores = log_probs([*prompt, *ours[:same]])
            gaps.append(abs(float(scores[ours[same]] - scores[other[same]])))
    return Agreement(equal / total if total else 1.0, len(gaps), max(gaps, default=0.0))


def float32_log_probs(folder: Path) -> LogProbs:
    """Log-probabilities of the model in `folder`, computed by transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def log_probs(tokens: Sequence[int]) -> torch.Tensor:
        with torch.inference_mode():
            logits = model(torch.tensor([list(tokens)]), logits_to_keep=1).logits[0, -1]
        return torch.log_softmax(logits, dim=-1)

    return log_probs
