"""Environments of episodes, as their processes hold them.  Nothing heavy is imported, so a process starts quickly."""

import asyncio
import inspect
import threading
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

from tlt_core.grpo import confinement, reward_styles, verifiers


class Reply(NamedTuple):
    """An environment's answer to a turn of the policy."""

    message: str
    reward: float
    done: bool
    failure: str = ""  # why there is no answer: the episode has ended


class Host:
    """Episodes of one process.  Methods of different episodes are called from different threads at once."""

    def __init__(self, path: str, max_memory_gb: float, pass_variables: tuple[str, ...]) -> None:
        confinement.confine(max_memory_gb=max_memory_gb, pass_variables=pass_variables)
        self._path, self._episodes = path, dict[Hashable, Any]()
        self._loop = asyncio.new_event_loop()  # one for all: what an environment opens belongs to its loop
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def step(self, key: Hashable, turn: int, text: str, prompt: str, answer: str, metadata: Mapping[str, Any]) -> Reply:
        """The answer to the policy's turn number `turn` of episode `key`, 0 for the first."""
        episode = None
        try:
            if turn == 0:
                episode = self._episodes[key] = reward_styles.load(self._path)()
                self._awaited(episode.reset(prompt=prompt, answer=answer, metadata=dict(metadata)))
            elif (episode := self._episodes.get(key)) is None:
                raise RuntimeError("the process that held the episode has ended")
            reply = _checked(self._awaited(episode.step(text)))
        except BaseException as error:  # users' code may raise anything, SystemExit included
            reply = Reply("", 0.0, done=True, failure=f"{self._path}: {verifiers.in_words(error)}")
        if reply.done and self._episodes.get(key) is episode:  # a late answer is of an episode that is forgotten
            self.forget(key)
        return reply

    def forget(self, key: Hashable) -> None:
        """The episode has ended."""
        self._episodes.pop(key, None)

    def _awaited(self, value: Any) -> Any:
        async def result() -> Any:
            return await value

        return asyncio.run_coroutine_threadsafe(result(), self._loop).result() if inspect.isawaitable(value) else value


def _checked(value: Any) -> Reply:
    """Raises TypeError or ValueError for what is no answer."""
    if not isinstance(value, tuple) or len(value) != 3 or not isinstance(value[0], str):
        raise TypeError(f"step returned {value!r:.100}; return (message, reward, done)")
    message, reward, done = value
    return Reply(message, verifiers.checked(reward), bool(done))
