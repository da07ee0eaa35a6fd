"""Configuration: how the policy is updated, by which algorithm, and the supervised training before it."""

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from conf.optimizer import AdamWConfig
from conf.section import MANY, MOST_CHANNELS, MOST_MB, MOST_TOKENS, Dtype, Section


class TorchBackend(Section):
    """Data parallelism in plain torch: float32 weights on each worker, all-reduced gradients.  Fastest on CPUs."""

    kind: Literal["torch"] = "torch"


class DeepSpeedBackend(Section):
    """DeepSpeed ZeRO over all workers."""

    kind: Literal["deepspeed"]
    zero_stage: Literal[0, 1, 2, 3] = 2
    """What is sharded.  0: nothing; 1: optimizer state; 2: also gradients; 3: also parameters."""
    offload_optimizer: bool = False
    """Keep the optimizer state in host memory.  Set it when GPU memory is short."""
    gather_bucket_mb: int = Field(128, ge=1, le=MOST_MB)
    """With stage 3: megabytes of weights that are gathered at once for the rollout replicas.  A larger tensor is
    gathered alone."""


Backend = Annotated[TorchBackend | DeepSpeedBackend, Field(discriminator="kind")]


class LoraConfig(Section):
    """Low-rank adapters (peft).  Rollouts use the merged weights."""

    enabled: bool = False
    """Train adapters in place of all weights."""
    rank: int = Field(16, ge=1, le=MOST_CHANNELS)
    """Rank of the update."""
    alpha: float = Field(32.0, gt=0)
    """The low-rank update is multiplied by alpha / rank."""
    target_modules: tuple[str, ...] = Field(("qkv_proj", "o_proj", "gate_up_proj", "down_proj"), min_length=1)
    """Modules of the decoder that get an adapter."""


class UpdateConfig(Section):
    """The policy update."""

    backend: Backend = TorchBackend()
    """Where the optimizer runs."""
    optimizer: AdamWConfig = AdamWConfig()
    """Optimizer of the policy."""
    num_minibatches: int = Field(1, ge=1, le=MANY)
    """Optimizer steps per epoch; each takes a share of the groups.  1, with num_epochs 1, is strictly on-policy."""
    num_epochs: int = Field(1, ge=1, le=1000)
    """Passes over the rollouts of an RL step."""
    tokens_per_micro_batch: int = Field(4096, ge=64, le=MOST_TOKENS)
    """Most tokens in one forward and backward pass of a worker; a longer sequence gets its own pass.  Lower it when
    memory is short."""
    groups_per_pack: int = Field(4, ge=1, le=MANY)
    """Most groups of responses that share passes; groups with long prompts share with fewer.  More groups make fuller
    passes; fewer are complete earlier, so idle workers can compute them while others still decode."""
    streamed: Literal["auto", "first", "last", "off"] = "auto"
    """Workers without requests compute gradients of groups that have ended.  The update stays the same to the bit.
    auto: before training the drafter, where possible; first, last: before it, after it; off: not at all."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more computation."""
    dtype: Dtype = "auto"
    """Type of the computation in training: policy, drafter and cold start.  Master weights are always float32.  auto:
    bfloat16 where the hardware supports it (AVX-512 bf16, AMX, GPUs from sm_80 on); float32 elsewhere, and when
    rollout.dtype is set to float32.  A resumed run keeps its type."""
    lora: LoraConfig = LoraConfig()
    """Low-rank adapters."""

    @field_validator("streamed", mode="before")
    @classmethod
    def _off_is_a_word(cls, value: object) -> object:
        """YAML reads a bare `off` as false."""
        return "off" if value is False else value

    @property
    def shards_weights(self) -> bool:
        """Does each worker keep a part of each weight alone?"""
        return isinstance(self.backend, DeepSpeedBackend) and self.backend.zero_stage == 3


class ColdStartConfig(Section):
    """Supervised warm-up on worked solutions made for the training tasks, before RL."""

    enabled: bool = False
    """Train on worked solutions first.  false: RL starts from the model as it is."""
    num_examples: int = Field(600, ge=1, le=MANY)
    """Number of worked solutions.  They are generated separately; none is a validation question."""
    num_epochs: int = Field(1, ge=1, le=1000)
    """Passes over the worked solutions."""
    tokens_per_step: int = Field(2048, ge=64, le=MOST_TOKENS)
    """Packed tokens per optimizer step, over all workers."""
    optimizer: AdamWConfig = AdamWConfig(learning_rate=1e-4)
    """Optimizer of this stage."""
    dtype: Dtype = "auto"
    """Type of the computation and of the saved weights.  auto: as update.dtype.  A resumed run keeps its type."""


class KLConfig(Section):
    """Penalty that keeps the policy near the model that RL started from (Schulman's estimators)."""

    kind: Literal["k1", "k2", "k3"] = "k3"
    """k1 = log r, k2 = (log r)^2 / 2, k3 = 1/r - 1 + log r, with r = policy / reference."""
    coef: float = Field(0.0, ge=0)
    """Weight of the penalty.  0: off, and no reference model is loaded."""
    place: Literal["loss", "reward"] = "loss"
    """loss: a term of the loss (k2 or k3); reward: subtracted from the reward of each response."""

    @model_validator(mode="after")
    def _has_a_gradient(self) -> "KLConfig":
        if self.coef > 0 and self.place == "loss" and self.kind == "k1":
            raise ValueError(
                "kind='k1' with place='loss': the expected gradient of log r is 0, so the penalty would do nothing; "
                "set kind to k2 or k3, or place to reward"
            )
        return self


Estimator = Literal["grpo", "dr_grpo", "rloo", "reinforce_pp_baseline"]
_OF_A_GROUP = ("grpo", "dr_grpo", "rloo")  # the advantages of a group need no other group's rewards


class AlgorithmConfig(Section):
    """Advantage estimator and policy-gradient loss."""

    advantage: Estimator = "grpo"
    """grpo: (r - mean) / std of the group; dr_grpo: r - mean; rloo: r - mean of the other responses;
    reinforce_pp_baseline: r - mean of the group, divided by the std of the batch."""
    clip_low: float = Field(0.2, gt=0, lt=1)
    """The probability ratio is clipped to at least 1 - clip_low."""
    clip_high: float = Field(0.28, gt=0)
    """The probability ratio is clipped to at most 1 + clip_high (DAPO's clip-higher)."""
    dual_clip: float = Field(3.0, gt=1)
    """Upper bound of the ratio for negative advantages (dual-clip PPO)."""
    loss_aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """token_mean: mean over all tokens of the minibatch (DAPO); sequence_mean: mean per sequence, then over sequences
    (GRPO); constant: sum / (sequences * max_new_tokens) (Dr. GRPO)."""
    dynamic_sampling: bool = False
    """Drop groups whose scores (before shaping) are all equal; sample more prompts until the step is full (DAPO)."""
    max_resample_rounds: int = Field(2, ge=0, le=1000)
    """Most additional rollouts of one step for dynamic sampling."""
    overlong_buffer_tokens: int = Field(0, ge=0, le=MOST_TOKENS)
    """Soft overlong penalty (DAPO): over this many last tokens before max_new_tokens, the reward falls linearly by up
    to `overlong_penalty`.  0: off."""
    overlong_penalty: float = Field(1.0, ge=0)
    """Largest deduction for an overlong response."""
    mask_truncated: bool = False
    """Leave responses that were cut at max_new_tokens out of the loss."""
    tis_cap: float = Field(2.0, ge=0)
    """Truncated importance sampling between rollout and update: weight = min(probability ratio, tis_cap).  0: off.
    Probabilities are those before top_p and top_k, so these do not shrink it; with vLLM they need 0."""
    kl: KLConfig = KLConfig()
    """KL penalty against the starting policy."""

    @property
    def needs_all_groups(self) -> bool:
        """Whether the advantages of a group are known only with the rewards of all groups."""
        return self.advantage not in _OF_A_GROUP
