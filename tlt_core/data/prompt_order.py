"""Which training prompts come next: a new permutation every epoch, keyed by the run seed.

The entries of the mixture are spread evenly, so every RL step sees the mixture in its proportions, and rewards of
different steps can be compared.  The position is one integer, so a resumed run goes on with the next prompt.
"""

from collections.abc import Collection, Sequence

import torch

from tlt_core.items.types import Prompt


class PromptOrder:
    """Endless pass over the training prompts."""

    def __init__(self, prompts: Sequence[Prompt], *, seed: int, cursor: int = 0) -> None:
        self._prompts, self._seed = prompts, seed
        self.cursor = cursor  # prompts consumed so far

    @property
    def epoch(self) -> float:
        return self.cursor / len(self._prompts)

    def take(self, count: int, *, without: Collection[int] = ()) -> list[Prompt]:
        """The next `count` prompts.  They are distinct, so there may be fewer; their ids are none of `without`.

        A prompt that comes a second time, soon after the end of an epoch, is passed over: its responses in one step
        would be the same, since their noise is.
        """
        chosen: list[Prompt] = []
        seen = set(without)
        while len(chosen) < count and len(seen) < len(self._prompts):
            epoch, offset = divmod(self.cursor, len(self._prompts))
            for index in self._epoch_order(epoch)[offset:]:
                self.cursor += 1
                prompt = self._prompts[index]
                if prompt.id not in seen:
                    seen.add(prompt.id)
                    chosen.append(prompt)
                if len(chosen) == count:
                    break
        return chosen

    def _epoch_order(self, epoch: int) -> list[int]:
        """Indexes of all prompts.  The r-th of n prompts of a mixture entry is placed at the fraction (r + 1/2) / n."""
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
        entries: dict[object, list[int]] = {}
        for index in torch.randperm(len(self._prompts), generator=generator).tolist():
            prompt = self._prompts[index]
            entries.setdefault((prompt.task, prompt.metadata.get("mixture")), []).append(index)
        placed = [((rank + 0.5) / len(entry), index) for entry in entries.values() for rank, index in enumerate(entry)]
        return [index for _, index in sorted(placed)]
