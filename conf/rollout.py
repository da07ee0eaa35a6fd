"""Configuration: how responses are decoded."""

from typing import Literal

from pydantic import Field, field_validator, model_validator

from conf.environment import EnvironmentConfig
from conf.section import MANY, MOST_LIVE, MOST_MB, MOST_TOKENS, Dtype, Section

_LEARNED = ("eagle3",)  # drafters that a folder holds
_LEAST_VLLM = 0.01  # vLLM's lowest temperature above 0


class StrategyConfig(Section):
    """One way to speculate.  The tuner chooses among several."""

    drafter: Literal["ngram", "eagle3"] = "ngram"
    """ngram: proposes what followed the same tokens in the prompt, the response or other responses to the prompt;
    eagle3: a trained one-layer network on the target's hidden states (`tlt warmup` makes one)."""
    depth: int = Field(ge=1, le=64)
    """Most draft tokens in a row."""
    width: int = Field(1, ge=1, le=16)
    """Most alternatives after one token.  1: a chain instead of a tree."""
    tokens: int = Field(ge=1, le=256)
    """Most draft tokens per request that one round verifies."""


class NgramConfig(Section):
    """The n-gram drafter."""

    min_match: int = Field(1, ge=1, le=MOST_TOKENS)
    """Number of last tokens that must match before a continuation is proposed."""
    max_index_tokens: int = Field(500_000, ge=1, le=1_000_000_000)
    """Largest index of one worker, in tokens (about 0.7 kB each).  The least recently used prompts go first."""


class SpeculationConfig(Section):
    """Speculative decoding.  It changes the time, never a sampled token."""

    policy: Literal["cost_model", "beg_mab", "fixed", "off"] = "cost_model"
    """How the strategy of a round is chosen.  cost_model: most expected tokens per second, from measured costs and the
    acceptance of each live request; beg_mab: TLT's bucketed epsilon-greedy bandit; fixed: always the first strategy;
    off: plain decoding."""
    strategies: tuple[StrategyConfig, ...] | None = Field(None, min_length=1)
    """Strategies to choose from, besides plain decoding.  None: a few for each available drafter."""
    drafter_path: str | None = None
    """Folder of an EAGLE-3 drafter for this policy, as `tlt warmup` writes it.  None: only the n-gram drafter."""
    ngram: NgramConfig = NgramConfig()
    """The n-gram drafter."""

    @field_validator("policy", mode="before")
    @classmethod
    def _off_is_a_word(cls, value: object) -> object:
        """YAML reads a bare `off` as false."""
        if value == "threshold":
            raise ValueError("threshold is gone: set cost_model, which learns with how many requests drafting pays")
        return "off" if value is False else value

    @model_validator(mode="after")
    def _drafters_exist(self) -> "SpeculationConfig":
        named = next((s.drafter for s in self.strategies or () if s.drafter in _LEARNED), None)
        if named is not None and self.drafter_path is None:
            raise ValueError(
                f"strategies name the drafter {named}, but drafter_path is not set: make one with 'tlt warmup' and "
                f"give its folder, or leave {named} out"
            )
        return self


class VllmConfig(Section):
    """vLLM as the rollout engine: one engine per worker, run by the Python that $VLLM_PYTHON names."""

    tensor_parallel: int = Field(1, ge=1, le=64)
    """Workers that share one engine, whose weights are divided among their GPUs: for models that one GPU does not hold.
    Such workers run on one node.  The first of them decodes, and trains the drafter; all update the policy."""
    kv_cache_mb: int | None = Field(None, ge=16, le=MOST_MB)
    """Megabytes for keys and values on each worker.  None: 512 on a CPU; on a GPU what weights and graphs leave of
    vLLM's share of its memory (`rollout.kv_memory_fraction`)."""
    eager: bool | None = None
    """true: run the model without compiling it; false: compile it first, which takes minutes, or half a minute from
    torch's cache.  None: true on CPUs."""


class RolloutConfig(Section):
    """What is sampled in one RL step, and how."""

    num_prompts: int = Field(8, ge=1, le=MANY)
    """Prompts per RL step.  The responses to one prompt are a group."""
    num_samples: int = Field(8, ge=1, le=100_000)
    """Responses per prompt: the size of a group."""
    max_new_tokens: int = Field(512, ge=1, le=MOST_TOKENS)
    """Longest response, in tokens.  A longer one is cut, with finish reason `length`."""
    max_prompt_tokens: int = Field(1024, ge=1, le=MOST_TOKENS)
    """Longest prompt, in tokens.  Longer prompts are dropped, and `tlt prepare` says how many."""
    temperature: float = Field(1.0, ge=0, le=10)
    """Sampling temperature; 0 is greedy.  At least 0.01 with vLLM, which takes less as 0.01."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling: keep the smallest set of tokens with this total probability.  1: off."""
    top_k: int = Field(0, ge=0, le=MANY)
    """Keep the k most probable tokens.  0: off."""
    stop_token_ids: tuple[int, ...] = ()
    """Further tokens that end a response, besides the model's and the tokenizer's ends of sequence and the token with
    which the chat template ends a turn."""
    max_live_requests: int = Field(32, ge=1, le=MOST_LIVE)
    """Responses decoded at once on one worker.  Each takes a slot of the KV cache."""
    kv_memory_fraction: float = Field(0.9, gt=0, le=1)
    """builtin: largest share of a GPU's free memory, after the model is loaded, for the KV cache; a run that needs more
    is refused at the start.  vllm: largest share of a GPU's memory for weights, graphs and KV cache together; less
    where the update and the drafter's training need more (`tlt doctor CONFIG --gpu 80` shows the plan)."""
    dispatch: Literal["pull", "static"] = "pull"
    """pull: a worker takes the next group when it has room; static: groups are assigned when the rollout begins."""
    dtype: Dtype = "auto"
    """Type of weights, activations and KV cache in rollouts, and of exported policies and drafters.  auto: bfloat16 on
    GPUs that support it, and on CPUs where the C kernels run or torch supports it; float32 elsewhere.  A resumed run
    keeps its type.  `tlt doctor` shows the choice."""
    speculation: SpeculationConfig = SpeculationConfig()
    """Speculative decoding."""
    engine: Literal["auto", "builtin", "vllm"] = "auto"
    """builtin: the engine of this package; vllm: vLLM with the plug-in `tlt_vllm`, for rollouts and validation; auto:
    vllm where each worker has a GPU and vLLM is installed (make vllm-env), else builtin; a resumed run keeps its
    engine.  Responses are the same up to rounding.  vLLM drafts chains of one drafter."""
    max_probs_diff: float = Field(0.05, gt=0, le=1)
    """The run ends when the probabilities of sampled tokens in the engine and in the update differ by more than this,
    as a mean over a step (`training/rollout_probs_diff_mean`)."""
    vllm: VllmConfig = VllmConfig()
    """Settings of engine vllm."""
    environment: EnvironmentConfig | None = None
    """What the policy talks with; None: each prompt has one response."""

    @field_validator("engine", mode="before")
    @classmethod
    def _has_a_new_name(cls, value: object) -> object:
        if value == "own":
            raise ValueError("own is called builtin now")
        return value

    @property
    def workers_per_engine(self) -> int:
        """Workers that share a rollout engine."""
        return self.vllm.tensor_parallel if self.engine in ("auto", "vllm") else 1

    @property
    def why_not_vllm(self) -> str:
        """What vLLM cannot do of this, and the remedy; empty where it can all."""
        if 0 < self.temperature < _LEAST_VLLM:
            return (
                f"rollout.temperature={self.temperature}: vLLM samples at {_LEAST_VLLM} then, while the update would "
                f"compute with {self.temperature}; set rollout.temperature to {_LEAST_VLLM} or more"
            )
        if self.speculation.policy == "off":
            return ""
        strategies = self.speculation.strategies or ()
        wide = next((strategy.width for strategy in strategies if strategy.width > 1), None)
        if wide is not None:
            return f"width={wide} in rollout.speculation.strategies: vLLM drafts chains; set every width to 1"
        drafters = sorted({strategy.drafter for strategy in strategies})
        if len(drafters) > 1:
            return (
                f"{' and '.join(drafters)} in rollout.speculation.strategies: a vLLM engine has one drafter; keep "
                "those of one"
            )
        return ""
