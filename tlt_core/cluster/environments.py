"""The environment's processes, as Ray actors beside the workers; see `conf/environment`."""

import time
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError

from conf.environment import EnvironmentConfig
from conf.reward import RewardConfig
from tlt_core.grpo.environment import Host, Reply
from tlt_core.items.types import NoiseKey, Prompt


class _Call(NamedTuple):
    key: NoiseKey
    answer: Any  # Ray's reference
    until_s: float


class Environments:
    """Ends with Ray."""

    def __init__(self, cfg: EnvironmentConfig, reward: RewardConfig) -> None:
        """reward: its limits of memory and variables hold here, too."""
        self._cfg = cfg
        actor: Any = ray.remote(num_cpus=0, max_restarts=-1)(Host)
        self._hosts = [
            actor.options(max_concurrency=cfg.max_running).remote(cfg.path, reward.max_memory_gb, reward.pass_variables)
            for _ in range(cfg.num_processes)
        ]
        self._calls: list[_Call] = []

    @property
    def is_waited_for(self) -> bool:
        return bool(self._calls)

    def step(self, key: NoiseKey, turn: int, text: str, prompt: Prompt) -> None:
        """Start a step of an episode; `replies` has its answer."""
        call = self._host(key).step.remote(key, turn, text, prompt.text, prompt.answer, dict(prompt.metadata))
        self._calls.append(_Call(key, call, time.monotonic() + self._cfg.timeout_s))

    def forget(self, key: NoiseKey) -> None:
        """The episode has ended, and its environment has not."""
        self._host(key).forget.remote(key)

    def replies(self) -> list[tuple[NoiseKey, Reply]]:
        """Answers that have come since the last call."""
        if not self._calls:
            return []
        references = [call.answer for call in self._calls]
        there = set(ray.wait(references, num_returns=len(references), timeout=0)[0])
        found, waiting = [], []
        for call in self._calls:
            if call.answer in there:
                found.append((call.key, _reply(call.answer)))
            elif time.monotonic() > call.until_s:
                ray.cancel(call.answer)
                limit = f"rollout.environment.timeout_s={self._cfg.timeout_s:g} s"
                found.append((call.key, Reply("", 0.0, done=True, failure=f"a step took longer than {limit}")))
            else:
                waiting.append(call)
        self._calls = waiting
        return found

    def _host(self, key: NoiseKey) -> Any:
        return self._hosts[(key.prompt_id + key.sample) % len(self._hosts)]


def _reply(answer: Any) -> Reply:
    try:
        reply: Reply = ray.get(answer)
    except RayError as error:
        return Reply("", 0.0, done=True, failure=f"its process ended ({type(error).__name__})")
    return reply
