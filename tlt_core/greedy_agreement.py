"""Do two engines decode the same model?  Their greedy tokens, and how near a tie was where they part.

Rounding differs between engines, so two tokens that are almost equally likely may change places, and what follows is
another text.  A wrong conversion shows otherwise: engines part at tokens that are far from equally likely.

    reference  5 9 9 4 ...
    theirs     5 9 7 1 ...     equal: 2 of 4 tokens;  gap: |log p(9) - log p(7)| after 5 9, of the model in float32
"""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import transformers

LogProbs = Callable[[Sequence[int]], torch.Tensor]  # tokens -> [V] of the next one


class Agreement(NamedTuple):
    """Of all responses together."""

    equal_tokens: float  # share of the reference's tokens that come before the two part
    parted: int  # responses that part
    largest_gap: float  # nats, where they part; 0 if none does


def agreement(
    prompts: Sequence[Sequence[int]],
    reference: Sequence[Sequence[int]],
    theirs: Sequence[Sequence[int]],
    *,
    enders: Collection[int],
    log_probs: LogProbs,
) -> Agreement:
    """`enders`: tokens that end a response; what follows the reference's first one does not count, nor does itself:
    engines differ in whether they forbid it where a fixed number of tokens is asked for."""
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
    """Of the model in `folder`, by transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def log_probs(tokens: Sequence[int]) -> torch.Tensor:
        with torch.inference_mode():
            logits = model(torch.tensor([list(tokens)]), logits_to_keep=1).logits[0, -1]
        return torch.log_softmax(logits, dim=-1)

    return log_probs
