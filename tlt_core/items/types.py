"""The items that travel through one RL iteration, one type per station.

    Prompt -> GenerationRequest -> Rollout -> RolloutBatch -> ScoredBatch -> (tlt_core/grpo) TrainBatch

Batches are packed tensors with offsets; these are saved (`items/store`).  Invariants are checked once, when an item is
made; other code relies on them.

Shape suffixes: R responses, T tokens of all responses back to back, P prompt tokens, L tokens of one response.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor


class FinishReason(IntEnum):
    """Why a response ended."""

    STOP = 0  # end-of-sequence or stop token; it is the last token of the response
    LENGTH = 1  # max_new_tokens or the model's context length reached


class NoiseKey(NamedTuple):
    """Names the noise of one response.  Together with a position it fixes the noise of one sampled token."""

    seed: int  # run seed
    step: int  # RL step; below 1 for validation, warm-up, export and generation without training
    prompt_id: int
    sample: int  # index in the group


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question.  Prompt(id=3, tokens=[1, 9, 2], text="2 + 3 = ?", answer="5", task="chain_sum", metadata={})"""

    id: int  # unique in the data set (train and validation together)
    tokens: Tensor  # [P] int32, chat template applied, generation prompt included
    text: str  # the question alone
    answer: str
    task: str  # reasoning-gym name, or "file"
    metadata: Mapping[str, Any] = field(default_factory=dict)  # what the task's scorer needs
    opening: str = ""  # what the chat template has said for the response already, such as "<think>\n"

    def __post_init__(self) -> None:
        require(self.tokens.dtype == torch.int32 and self.tokens.ndim == 1, "prompt tokens must be [P] int32")
        require(self.tokens.numel() > 0, f"prompt {self.id} is empty")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen.  SamplingParams(temperature=1.0, max_new_tokens=512, stop_token_ids=(2,))"""

    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    max_new_tokens: int = 512
    stop_token_ids: tuple[int, ...] = ()
    plain: bool = False  # without speculation: the same tokens, later; our engine alone

    def __post_init__(self) -> None:
        found = f"temperature is {self.temperature}: give 0 (greedy) or a positive number"
        require(0 <= self.temperature < math.inf, found)
        require(0 < self.top_p <= 1, f"top_p is {self.top_p}: give a number above 0 and at most 1 (1: off)")
        require(self.top_k >= 0, f"top_k is {self.top_k}: give 0 (off) or a positive number")
        require(self.max_new_tokens >= 1, f"max_new_tokens is {self.max_new_tokens}: give at least 1")


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One response to be sampled: a prompt, and the key of the noise that decides it."""

    key: NoiseKey
    prompt_tokens: Tensor  # [P] int32
    max_new_tokens: int | None = None  # lower than that of `SamplingParams`; None: the same
    may_continue: bool = False  # a request of the same key may follow, whose prompt begins with this one's tokens


class Earned(NamedTuple):
    """What an environment gave for an episode."""

    reward: float
    failure: str = ""  # why it could not go on


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sampled answer, or one episode: answers with an environment's replies between them.

    Rollout(key=NoiseKey(0, 1, 3, 0), tokens=[5, 9, 2], prompt_len=1, logprobs=[-0.1, -1.2], finish=STOP, ...)
    """

    key: NoiseKey
    tokens: Tensor  # [L] int32, prompt then completion
    prompt_len: int
    logprobs: Tensor  # [L - prompt_len] float32, log-probabilities of the sampling policy, after temperature
    finish: FinishReason
    policy_version: int
    worker: int = 0
    started_s: float = 0.0  # time.time() when the request got its slot
    finished_s: float = 0.0
    sampled: Tensor | None = None  # [L - prompt_len] bool, False on an environment's tokens; None: there are none
    earned: Earned | None = None  # None: without an environment

    def __post_init__(self) -> None:
        require(self.tokens.dtype == torch.int32, "rollout tokens must be int32")
        require(0 < self.prompt_len < len(self.tokens), f"prompt_len {self.prompt_len} of {len(self.tokens)} tokens")
        require(len(self.logprobs) == len(self.tokens) - self.prompt_len, "one log-prob per completion token")

    @property
    def completion(self) -> Tensor:
        """What follows the prompt, [L - prompt_len] int32, stop token included."""
        return self.tokens[self.prompt_len :]


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """Responses packed back to back in the order of (prompt_id, sample), whatever the order in which they finished.

    Two responses of 3 and 2 tokens: tokens_T=[5, 9, 2, 7, 2], offsets_R1=[0, 3, 5], prompt_lens_R=[1, 1].
    """

    tokens_T: Tensor  # int32
    logprobs_T: Tensor  # float32, aligned with tokens_T: entry t is log p(tokens[t] | tokens[<t]); 0 where not sampled
    sampled_T: Tensor  # bool, True on tokens of the policy, False on prompts and on an environment's tokens
    offsets_R1: Tensor  # [R + 1] int64
    prompt_lens_R: Tensor  # int64
    prompt_ids_R: Tensor  # int64
    samples_R: Tensor  # int64, index in the group
    finish_R: Tensor  # int64, FinishReason
    policy_version_R: Tensor  # int64
    worker_R: Tensor  # int64
    started_s_R: Tensor  # float64
    finished_s_R: Tensor  # float64

    def __post_init__(self) -> None:
        require(self.tokens_T.dtype == torch.int32 and self.offsets_R1.dtype == torch.int64, "wrong dtypes")
        lengths = {len(self.tokens_T), len(self.logprobs_T), len(self.sampled_T)}
        require({int(self.offsets_R1[-1])} == lengths, "offsets do not fit tokens")
        require(bool((self.lengths_R > self.prompt_lens_R).all()), "a response without completion tokens")

    def __len__(self) -> int:
        return len(self.prompt_lens_R)

    @property
    def lengths_R(self) -> Tensor:
        """Prompt plus completion tokens, int64."""
        return self.offsets_R1.diff()

    @property
    def response_lens_R(self) -> Tensor:
        """Completion tokens, int64."""
        return self.lengths_R - self.prompt_lens_R

    @property
    def sampled_lens_R(self) -> Tensor:
        """Those of them that the policy sampled, int64."""
        return offsets_of(self.sampled_T.long())[self.offsets_R1].diff()

    def completion(self, index: int) -> Tensor:
        """What follows the prompt of one response, int32."""
        start, end = int(self.offsets_R1[index]), int(self.offsets_R1[index + 1])
        return self.tokens_T[start + int(self.prompt_lens_R[index]) : end]

    def take(self, responses: Sequence[int]) -> "RolloutBatch":
        starts, ends = self.offsets_R1[:-1], self.offsets_R1[1:]
        spans = [slice(int(starts[r]), int(ends[r])) for r in responses]
        index = torch.tensor(list(responses), dtype=torch.int64)
        per_response = {f.name: getattr(self, f.name)[index] for f in fields(self) if f.name.endswith("_R")}
        return RolloutBatch(
            tokens_T=torch.cat([self.tokens_T[s] for s in spans]),
            logprobs_T=torch.cat([self.logprobs_T[s] for s in spans]),
            sampled_T=torch.cat([self.sampled_T[s] for s in spans]),
            offsets_R1=offsets_of(self.lengths_R[index]),
            **per_response,
        )

    @classmethod
    def join(cls, batches: Sequence["RolloutBatch"]) -> "RolloutBatch":
        names = [f.name for f in fields(cls) if f.name != "offsets_R1"]
        joined = {name: torch.cat([getattr(b, name) for b in batches]) for name in names}
        return cls(offsets_R1=offsets_of(torch.cat([b.lengths_R for b in batches])), **joined)

    @classmethod
    def pack(cls, rollouts: Sequence[Rollout]) -> "RolloutBatch":
        require(len(rollouts) > 0, "no rollouts to pack")
        ordered = sorted(rollouts, key=lambda r: (r.key.prompt_id, r.key.sample))
        offsets = offsets_of(torch.tensor([len(r.tokens) for r in ordered]))
        logprobs, sampled = torch.zeros(int(offsets[-1])), torch.zeros(int(offsets[-1]), dtype=torch.bool)
        for r, end in zip(ordered, offsets[1:].tolist(), strict=True):
            logprobs[end - len(r.logprobs) : end] = r.logprobs
            sampled[end - len(r.logprobs) : end] = True if r.sampled is None else r.sampled
        return cls(
            tokens_T=torch.cat([r.tokens for r in ordered]),
            logprobs_T=logprobs,
            sampled_T=sampled,
            offsets_R1=offsets,
            prompt_lens_R=torch.tensor([r.prompt_len for r in ordered]),
            prompt_ids_R=torch.tensor([r.key.prompt_id for r in ordered]),
            samples_R=torch.tensor([r.key.sample for r in ordered]),
            finish_R=torch.tensor([int(r.finish) for r in ordered]),
            policy_version_R=torch.tensor([r.policy_version for r in ordered]),
            worker_R=torch.tensor([r.worker for r in ordered]),
            started_s_R=torch.tensor([r.started_s for r in ordered], dtype=torch.float64),
            finished_s_R=torch.tensor([r.finished_s for r in ordered], dtype=torch.float64),
        )


class ScoreStatus(IntEnum):
    """How the scoring of one response ended."""

    OK = 0
    UNPARSEABLE = 1  # no answer could be extracted; counted apart from wrong answers
    TIMEOUT = 2
    ERROR = 3


@dataclass(frozen=True, slots=True)
class ScoredBatch:
    """Rollouts with rewards and group-relative advantages."""

    rollouts: RolloutBatch
    rewards_R: Tensor  # float32, weighted sum of the reward functions, shaping and KL-in-reward included
    scores_R: Tensor  # float32, the weighted sum alone, before shaping
    components_RF: Tensor  # float32, one column per reward function, before weighting
    status_R: Tensor  # int64, ScoreStatus (the worst over the functions)
    reward_s_R: Tensor  # float32, seconds spent on each sample
    advantages_R: Tensor  # float32

    def __post_init__(self) -> None:
        n = len(self.rollouts)
        for name in ("rewards_R", "scores_R", "status_R", "reward_s_R", "advantages_R"):
            require(len(getattr(self, name)) == n, f"{name} must have {n} entries")
        for name in ("rewards_R", "advantages_R"):
            bad = (~getattr(self, name).isfinite()).nonzero().flatten().tolist()
            require(not bad, f"{name} is not finite for responses {bad[:5]}: check the weights in reward.functions")

    def take(self, responses: Sequence[int]) -> "ScoredBatch":
        index = torch.tensor(list(responses), dtype=torch.int64)
        own = {f.name: getattr(self, f.name)[index] for f in fields(self) if f.name != "rollouts"}
        return ScoredBatch(rollouts=self.rollouts.take(responses), **own)

    @classmethod
    def join(cls, batches: Sequence["ScoredBatch"]) -> "ScoredBatch":
        own = {f.name: torch.cat([getattr(b, f.name) for b in batches]) for f in fields(cls) if f.name != "rollouts"}
        return cls(rollouts=RolloutBatch.join([b.rollouts for b in batches]), **own)


class WorkerState(IntEnum):
    """What a worker is doing: always exactly one of these.  `WorkerSpan` has the times."""

    IDLE = 0  # nothing to do while others still generate
    BUSY = 1  # generating
    TRAINING = 2  # training the drafter in idle time
    UPDATING = 3  # policy update
    STREAMING = 4  # part of the policy update, in idle time


class WorkerSpan(NamedTuple):
    """One worker was in one state from start to end (time.time() seconds)."""

    worker: int
    state: WorkerState
    start_s: float
    end_s: float


def offsets_of(lengths: Tensor) -> Tensor:
    """[2, 3] -> [0, 2, 5]"""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def require(condition: bool, message: str) -> None:
    """Raises ValueError where an item is not as it should be."""
    if not condition:
        raise ValueError(message)
