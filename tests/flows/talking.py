"""Environments for a random model: what they say depends on what it says."""

import asyncio
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
    """Some episodes raise, hang, end their process or answer with nothing of use."""

    async def step(self, text: str) -> tuple[str, float, bool]:
        reply = await super().step(text)
        kind = len(text) % 12
        if kind == 0:
            raise ValueError("no answer today")
        if kind == 1:
            await asyncio.sleep(60)
        if len(text) % 24 == 2 and self._turn == 2:
            os._exit(3)
        return "?" if kind == 3 else reply  # type: ignore[return-value]
