"""Environments for a random model: what they say depends on what it says."""

import asyncio
import itertools
import os


class Talk:
    """Rewards lower-case letters, turn by turn; ends at the first text without one."""

    def reset(self, *, prompt: str, answer: str, metadata: dict[str, object]) -> None:
        self._turn, self._answer = 0, answer

    async def step(self, text: str) -> tuple[str, float, bool]:
        self._turn += 1
        share = sum(c.islower() for c in text) / max(len(text), 1)
        return f"{self._turn}: {share:.2f} {self._answer}", share, share == 0


class Unlucky(Talk):
    """Of the episodes of each process some raise, hang, answer with nothing of use, or end the process."""

    _started = itertools.count()

    def reset(self, *, prompt: str, answer: str, metadata: dict[str, object]) -> None:
        super().reset(prompt=prompt, answer=answer, metadata=metadata)
        self._number = next(self._started)

    async def step(self, text: str) -> tuple[str, float, bool]:
        reply = await super().step(text)
        if self._number == 5:
            raise ValueError("no answer today")
        if self._number == 7:
            await asyncio.sleep(60)
        if self._number == 9:
            return "?"  # type: ignore[return-value]  # which is refused: the test asks for that
        if self._number == 12 and self._turn == 2:
            os._exit(3)
        return ("go on", 0.5, False) if self._number == 12 else reply
