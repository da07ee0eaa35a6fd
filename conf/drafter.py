"""Configuration: the drafter, its training in idle time, and its retraining."""

from typing import Literal

from pydantic import Field

from conf.section import MANY, MOST_LIVE, MOST_MB, MOST_STEPS, MOST_TOKENS, Section


class IdleTrainingConfig(Section):
    """Training of the drafter on workers that have finished their responses, while other workers still decode."""

    enabled: bool = True
    """Train in idle time.  Has no effect without an EAGLE-3 drafter in the rollout."""
    interval: int = Field(1, ge=1, le=MOST_STEPS)
    """Train and publish every N RL steps."""
    min_idle_s: float = Field(0.1, ge=0)
    """Seconds that a worker is idle before it begins to train."""
    max_steps: int = Field(0, ge=0, le=MOST_STEPS)
    """Most micro-steps (`micro_step_s`) in one rollout, over all workers.  0: as many as fit into the idle time."""
    after_rollout_s: float = Field(0.0, ge=0)
    """Seconds of training on every worker after the rollout has ended.  They lengthen the step.  Set it for a single
    worker, which is idle only while rewards are computed."""
    micro_step_s: float = Field(0.6, gt=0)
    """Most seconds of training between two checks of whether the worker is needed.  The micro-step under way when the
    rollout ends is finished."""
    rows_per_step: int = Field(256, ge=1, le=MOST_TOKENS)
    """Tokens per optimizer step, collected over several micro-steps.  A smaller value makes noisier gradients and reads
    the weights more often, which slows the workers that still decode."""
    window_rows: int = Field(256, ge=1, le=MOST_TOKENS)
    """Longer responses are split into windows of at most this many tokens; each window keeps its whole context."""
    learning_rate: float = Field(1e-4, gt=0)
    """Learning rate of AdamW: 20 steps of warm-up, then constant.  The default is the rate at which the first training
    (`drafter.learning_rate`) ends."""
    average_decay: float = Field(0.94, ge=0, lt=1)
    """The published weights are an exponential moving average over optimizer steps with this decay, because steps of
    few tokens are noisy.  0: publish the newest weights."""
    loss: Literal["soft_ce", "tv"] = "tv"
    """As `drafter.loss`.  A drafter that agrees with the policy on most tokens gains more from tv."""
    max_buffer_mb: int = Field(1024, ge=1, le=MOST_MB)
    """Most megabytes of hidden states that a worker keeps: the running step in memory, earlier ones in files.  The
    oldest responses are dropped first."""
    max_sequences: int = Field(4096, ge=1, le=MANY)
    """Most responses that a worker keeps."""
    length_bias: float = Field(0.5, ge=0)
    """A response of n tokens is drawn with weight n^(1 + length_bias).  Larger values favour long responses, which make
    up the tail of a rollout."""
    recency: float = Field(0.5, gt=0, le=1)
    """Factor on that weight for each RL step since the response was sampled.  1: age does not count."""
    canary_tokens: int = Field(1024, ge=1, le=MOST_TOKENS)
    """Held-out tokens on which a trained drafter is compared with the one in use.  They come from a quarter of the
    prompts of the two newest steps."""
    canary_errors: float = Field(1.64, ge=0)
    """A trained drafter is refused when it is worse by more than this many standard errors.  1.64 refuses one in twenty
    drafters that are equally good; 0 refuses every drafter that measures worse."""
    keep_published: int = Field(0, ge=0, le=MANY)
    """Published drafters that are kept in `runs/NAME/drafters/STEP-eagle3`, in the format of vLLM and SGLang.  Newest
    first; 0: none.  Writing one lengthens the step a little."""
    max_rejections: int = Field(3, ge=1, le=MANY)
    """After this many refusals in a row, training starts again from the drafter in use."""


class DrafterConfig(Section):
    """The EAGLE-3 drafter: its first training on rollouts of the policy (`tlt warmup`), then training in idle time."""

    warmup: bool = False
    """Let `tlt train` make the first drafter after the cold start.  Has no effect when
    `rollout.speculation.drafter_path` is set or speculation is off."""
    idle_training: IdleTrainingConfig = IdleTrainingConfig()
    """Training in idle time."""
    vocab_size: int = Field(4096, ge=64, le=MANY)
    """Size of the drafter's vocabulary: the tokens that are most frequent in the policy's rollouts."""
    depth: int = Field(6, ge=1, le=16)
    """Draft steps that are unrolled in training (EAGLE-3's training-time test).  Best equal to the depth of the deepest
    strategy."""
    loss: Literal["soft_ce", "tv"] = "soft_ce"
    """Loss of the first training.  soft_ce: cross-entropy with the policy's distribution; tv: total variation, the
    probability that a draft token is rejected (learns slowly from tokens that the drafter gives no probability)."""
    num_prompts: int = Field(32, ge=2, le=MANY)
    """Training prompts that the policy answers for the first training; one in eight is held out for measuring."""
    num_samples: int = Field(4, ge=1, le=100_000)
    """Responses per prompt."""
    num_steps: int = Field(400, ge=1, le=MOST_STEPS)
    """Optimizer steps."""
    tokens_per_step: int = Field(1024, ge=16, le=MOST_TOKENS)
    """Tokens per optimizer step.  A longer sequence is a step of its own."""
    learning_rate: float = Field(1e-3, gt=0)
    """Peak learning rate of AdamW: 20 steps of warm-up, then linear decay to a tenth."""


class RetrainConfig(Section):
    """Retraining of the drafter for the newest policy (`tlt retrain`).  The new drafter and the champion decode
    held-out prompts, and the better one becomes the champion."""

    num_prompts: int = Field(16, ge=1, le=MANY)
    """Validation prompts that both decode, from the first on.  No drafter is trained on them."""
    num_samples: int = Field(1, ge=1, le=100_000)
    """Responses per prompt."""
    max_new_tokens: int | None = Field(None, ge=1, le=MOST_TOKENS)
    """Longest response, in tokens.  None: as in rollout."""
    max_live_requests: int = Field(4, ge=1, le=MOST_LIVE)
    """Responses decoded at once.  Few, as in the tail of a rollout."""
    repeats: int = Field(3, ge=1, le=1000)
    """Speed measurements; the median counts."""
    min_gain: float = Field(0.02, ge=0)
    """Smallest relative gain in acceptance length over the champion.  0.02: two percent longer."""
    min_speed: float = Field(0.95, ge=0)
    """Smallest decoding speed relative to the champion's.  0: speed does not count."""
    alert_below: float = Field(0.8, ge=0, le=1)
    """`tlt check-drafter` reports a drop when the champion's accepted draft tokens a round (acceptance length minus 1)
    are below this share of what they were at its promotion.  0: never."""
