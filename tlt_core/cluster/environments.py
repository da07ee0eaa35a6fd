"""The environment's processes, as Ray actors beside the workers; see `conf/environment`."""

import time
from collections import deque
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from conf.environment import EnvironmentConfig
from conf.reward import RewardConfig
from tlt_core.grpo.environment import Host, Reply
from tlt_core.items.types import NoiseKey, Prompt


class _Call(NamedTuple):
    key: NoiseKey
    arguments: tuple[Any, ...]  # of `Host.step`, after the key


class _Running(NamedTuple):
    key: NoiseKey
    host: int
    answer: Any  # Ray's reference
    until_s: float


class Environments:
    """Ends with Ray."""

    def __init__(self, cfg: EnvironmentConfig, reward: RewardConfig) -> None:
        """reward: its limits of memory and variables hold here, too."""
        self._cfg = cfg
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        # A step that is asked for while a process starts again is tried once more; if its episode was lost, it says so.
        actor: Any = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=1)(Host)
        options = {"max_concurrency": cfg.max_running + 1, "scheduling_strategy": here}
        self._hosts = [
            actor.options(**options).remote(cfg.path, reward.max_memory_gb, reward.pass_variables)
            for _ in range(cfg.num_processes)
        ]
        self._waiting: list[deque[_Call]] = [deque() for _ in self._hosts]
        self._running: list[_Running] = []
        self._hung = [0] * cfg.num_processes  # steps that took too long, each of which may hold a thread for good

    @property
    def is_waited_for(self) -> bool:
        return bool(self._running) or any(self._waiting)

    def step(self, key: NoiseKey, turn: int, text: str, prompt: Prompt) -> None:
        """Start a step of an episode, or let it wait for its turn; `replies` has its answer."""
        arguments = (turn, text, prompt.text, prompt.answer, dict(prompt.metadata))
        self._waiting[self._of(key)].append(_Call(key, arguments))
        self._start()

    def forget(self, key: NoiseKey) -> None:
        """The episode has ended, and its environment has not."""
        self._hosts[self._of(key)].forget.remote(key)

    def replies(self) -> list[tuple[NoiseKey, Reply]]:
        """Answers that have come since the last call."""
        if not self._running:
            return []
        references = [call.answer for call in self._running]
        there = set(ray.wait(references, num_returns=len(references), timeout=0)[0])
        found, running = [], []
        for call in self._running:
            if call.answer in there:
                found.append((call.key, _reply(call.answer)))
            elif time.monotonic() > call.until_s:
                limit = f"rollout.environment.timeout_s={self._cfg.timeout_s:g} s"
                found.append((call.key, Reply("", 0.0, done=True, failure=f"a step took longer than {limit}")))
                self._give_up(call)
            else:
                running.append(call)
        self._running = running
        self._start()
        return found

    def _start(self) -> None:
        """Steps that wait, as far as their processes have threads: their time begins now."""
        for number, (host, waiting) in enumerate(zip(self._hosts, self._waiting, strict=True)):
            free = self._cfg.max_running - self._hung[number] - sum(call.host == number for call in self._running)
            for call in [waiting.popleft() for _ in range(min(free, len(waiting)))]:
                answer = host.step.remote(call.key, *call.arguments)
                self._running.append(_Running(call.key, number, answer, time.monotonic() + self._cfg.timeout_s))

    def _give_up(self, call: _Running) -> None:
        """A step hangs.  When half of a process's threads do, it is replaced, and its other episodes end, too."""
        self.forget(call.key)
        self._hung[call.host] += 1
        if 2 * self._hung[call.host] >= self._cfg.max_running:
            ray.kill(self._hosts[call.host], no_restart=False)
            self._hung[call.host] = 0

    def _of(self, key: NoiseKey) -> int:
        return (key.prompt_id + key.sample) % len(self._hosts)


def _reply(answer: Any) -> Reply:
    try:
        reply: Reply = ray.get(answer)
    except RayError as error:
        return Reply("", 0.0, done=True, failure=f"its process ended ({type(error).__name__})")
    return reply
