"""Responses that are conversations with an environment: turns of the policy, with messages between them.

    finished turn --step--> environment --message--> prompt + turns + message: the request for the next turn
                                       '--done-----> one rollout, in which the messages are not sampled

A turn's noise depends on its positions, as everywhere, so an episode is the same whatever decodes it, and when.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from conf.environment import EnvironmentConfig
from conf.run import RunConfig
from tlt_core.cluster.environments import Environments
from tlt_core.data.chat import encode_turn
from tlt_core.grpo.environment import Reply
from tlt_core.items.types import Earned, FinishReason, GenerationRequest, NoiseKey, Rollout
from tlt_core.run.prompts import Prompts

log = logging.getLogger(__name__)

_MAX_WARNINGS = 10


def episodes(cfg: RunConfig, prompts: Prompts) -> "Episodes | None":
    """Of a run with an environment, whose processes start; Ray has to run."""
    environment = cfg.rollout.environment
    if environment is None:
        return None
    processes = Environments(environment, cfg.reward)
    return Episodes(environment, processes, prompts, template_kwargs=cfg.data.chat_template_kwargs)


class Episodes:
    def __init__(
        self,
        cfg: EnvironmentConfig,
        environments: Environments,
        prompts: Prompts,
        *,
        template_kwargs: Mapping[str, Any],
    ) -> None:
        """template_kwargs: variables of the chat template."""
        self._cfg, self._environments, self._prompts = cfg, environments, prompts
        self._by_id, self._template_kwargs = prompts.by_id, template_kwargs
        self._turns: dict[NoiseKey, list[Rollout]] = {}  # of episodes that have not ended
        self._earned: dict[NoiseKey, float] = {}
        self._requests: list[tuple[GenerationRequest, int]] = []
        self._warned: set[str] = set()

    @property
    def are_waiting(self) -> bool:
        """Whether an environment is asked right now."""
        return self._environments.is_waited_for

    def advance(self, turns: Iterable[Rollout], *, max_new_tokens: int) -> list[Rollout]:
        """Turns that have ended go in, episodes that have ended come out; `requests` has the next turns.

        max_new_tokens: of an episode, messages included."""
        ended = []
        for turn in turns:
            so_far = self._turns.setdefault(turn.key, [])
            so_far.append(turn)
            if turn.finish == FinishReason.LENGTH and self._room(turn.key, turn.tokens, max_new_tokens) == 0:
                self._environments.forget(turn.key)
                ended.append(self._end(turn.key, FinishReason.LENGTH))
            else:
                text = self._prompts.text(turn.completion)
                self._environments.step(turn.key, len(so_far) - 1, text, self._by_id[turn.key.prompt_id])
        for key, reply in self._environments.replies():
            self._earned[key] = self._earned.get(key, 0.0) + reply.reward
            if reply.done:
                ended.append(self._end(key, FinishReason.STOP, failure=reply.failure))
            elif (why := self._continue(key, reply, max_new_tokens)) is not None:
                self._environments.forget(key)
                ended.append(self._end(key, why))
        return ended

    def begin(self, request: GenerationRequest) -> GenerationRequest:
        """The first turn."""
        return replace(request, max_new_tokens=self._cfg.max_turn_tokens, may_continue=self._cfg.max_turns > 1)

    def requests(self) -> list[tuple[GenerationRequest, int]]:
        """Turns that can begin, each with the worker that has decoded the turn before."""
        found, self._requests = self._requests, []
        return found

    def _room(self, key: NoiseKey, tokens: Tensor, max_new_tokens: int) -> int:
        return max_new_tokens - (len(tokens) - self._turns[key][0].prompt_len)

    def _continue(self, key: NoiseKey, reply: Reply, max_new_tokens: int) -> FinishReason | None:
        """Prepare the next turn.  There is none when the turns are used up, or the tokens: then why."""
        turns = self._turns[key]
        said = encode_turn(
            self._prompts.tokenizer,
            reply.message,
            ended_by=int(turns[-1].tokens[-1]),
            template_kwargs=self._template_kwargs,
        )
        tokens = torch.cat([turns[-1].tokens, torch.tensor(said, dtype=torch.int32)])
        room = self._room(key, tokens, max_new_tokens)
        if len(turns) >= self._cfg.max_turns:
            return FinishReason.STOP
        if room < 1:
            return FinishReason.LENGTH
        most = min(room, self._cfg.max_turn_tokens or room)
        is_last = len(turns) + 1 == self._cfg.max_turns
        self._requests.append((GenerationRequest(key, tokens, most, may_continue=not is_last), turns[-1].worker))
        return None

    def _end(self, key: NoiseKey, finish: FinishReason, *, failure: str = "") -> Rollout:
        turns, earned = self._turns.pop(key), self._earned.pop(key, 0.0)
        first, last = turns[0], turns[-1]
        if failure:
            self._warn(failure, key)
        size = len(last.tokens) - first.prompt_len
        logprobs, sampled = torch.zeros(size), torch.zeros(size, dtype=torch.bool)
        for turn in turns:
            own = slice(turn.prompt_len - first.prompt_len, len(turn.tokens) - first.prompt_len)
            logprobs[own], sampled[own] = turn.logprobs, True
        return replace(
            last,
            prompt_len=first.prompt_len,
            logprobs=logprobs,
            sampled=sampled,
            finish=finish,
            started_s=first.started_s,
            earned=Earned(0.0 if failure else earned, failure),
        )

    def _warn(self, failure: str, key: NoiseKey) -> None:
        """Each failure once, and only the first few: metrics count them."""
        if failure not in self._warned and len(self._warned) < _MAX_WARNINGS:
            self._warned.add(failure)
            log.warning("the episode of prompt %d, sample %d: %s; it scores 0", key.prompt_id, key.sample, failure)
