"""Which training prompts come next: a fresh permutation every epoch, keyed by the run seed.

The position is one integer, so a resumed run goes on with the very prompt that the killed one would have taken.
"""

from collections.abc import Sequence

import torch

from tlt_core.types import Prompt


class PromptOrder:
    """Endless pass over the training prompts."""

    def __init__(self, prompts: Sequence[Prompt], *, seed: int, cursor: int = 0) -> None:
        self._prompts = prompts
        self._seed = seed
        self.cursor = cursor  # prompts consumed so far

    @property
    def epoch(self) -> float:
        """Passes over the data so far."""
        return self.cursor / len(self._prompts)

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts; distinct unless `count` crosses the end of an epoch."""
        chosen: list[Prompt] = []
        while len(chosen) < count:
            epoch, offset = divmod(self.cursor, len(self._prompts))
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            order = torch.randperm(len(self._prompts), generator=generator).tolist()
            taken = order[offset : offset + count - len(chosen)]
            chosen.extend(self._prompts[i] for i in taken)
            self.cursor += len(taken)
        return chosen
