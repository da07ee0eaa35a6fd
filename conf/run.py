"""The configuration of one run: a frozen pydantic tree.

`conf/load.py` makes it from YAML files and command-line overrides.  Each subsystem has a file.  Only the standard
library and pydantic are imported, so a wrong key is reported in well under a second.  Each section is passed to the
class that uses it; only flows and `Session` see the whole tree.
"""

from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from conf.data import DataConfig
from conf.drafter import DrafterConfig, RetrainConfig
from conf.model import ModelConfig, PretrainedModel
from conf.reward import RewardConfig
from conf.rollout import RolloutConfig
from conf.section import MANY, MOST_SEED, MOST_STEPS, MOST_TOKENS, Section
from conf.system import CheckpointConfig, ClusterConfig, TrackingConfig
from conf.update import AlgorithmConfig, ColdStartConfig, UpdateConfig


class EvaluationConfig(Section):
    """Validation during training."""

    every_steps: int = Field(0, ge=0, le=MOST_STEPS)
    """RL steps between validations.  The policy is also validated before the first step and at the end.  0: never."""
    num_prompts: int = Field(32, ge=1, le=MANY)
    """Validation prompts that are used, from the first on."""
    num_samples: int = Field(0, ge=0, le=100_000)
    """Sampled responses per prompt for mean@k and pass@k, besides one greedy response.  0: only the greedy one."""
    max_new_tokens: int | None = Field(None, ge=1, le=MOST_TOKENS)
    """Longest validation response, in tokens.  Lower it when a few long ones delay the run.  A higher limit than the
    rollout's makes the workers' slots for keys and values as long.  None: as in rollout."""
    plain_every_steps: int = Field(0, ge=0, le=MOST_STEPS)
    """RL steps between comparisons: the step's rollouts are decoded once more, plainly and without idle work.  Tokens
    are the same then, and the time tells what is saved.  Also at the last step.  0: never.  The builtin engine only."""


class RunConfig(Section):
    """One training run.  `RunConfig(name="demo", data={"kind": "reasoning_gym", "tasks": [{"name": "chain_sum"}]})`"""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)
    """Name of the run and of its folder under `output_dir`.  Starting the same name again resumes the run."""
    num_steps: int = Field(8, ge=1, le=MOST_STEPS)
    """Number of RL steps."""
    seed: int = Field(0, ge=0, le=MOST_SEED)
    """Seed of everything random in the run: sampling, data order, initialisation."""
    output_dir: str = "runs"
    """Folder that holds the folders of all runs."""
    model: ModelConfig = PretrainedModel()
    """The model that training starts from."""
    data: DataConfig
    """Prompts and answers."""
    coldstart: ColdStartConfig = ColdStartConfig()
    """Supervised training before RL."""
    rollout: RolloutConfig = RolloutConfig()
    """How responses are sampled."""
    reward: RewardConfig = RewardConfig()
    """How responses are scored."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """Advantages and loss."""
    update: UpdateConfig = UpdateConfig()
    """Policy update."""
    drafter: DrafterConfig = DrafterConfig()
    """Training of the drafter."""
    retrain: RetrainConfig = RetrainConfig()
    """Scheduled retraining of the drafter."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Validation."""
    cluster: ClusterConfig = ClusterConfig()
    """Workers."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints."""
    tracking: TrackingConfig = TrackingConfig()
    """Experiment tracking with MLflow."""

    @property
    def run_dir(self) -> Path:
        return Path(self.output_dir) / self.name

    @property
    def rollouts_per_step(self) -> int:
        """Responses sampled in one step (before dynamic sampling)."""
        return self.rollout.num_prompts * self.rollout.num_samples

    def optimizer_steps(self, steps: int) -> int:
        """Optimizer steps that so many RL steps make."""
        return steps * self.update.num_minibatches * self.update.num_epochs

    @property
    def longest_response(self) -> int:
        """Tokens of the longest response that a worker decodes, in rollouts or in validation."""
        return max(self.rollout.max_new_tokens, self.evaluation.max_new_tokens or 0)

    @property
    def needs_first_drafter(self) -> bool:
        """Whether `tlt train` makes the first drafter."""
        speculation = self.rollout.speculation
        return self.drafter.warmup and speculation.policy != "off" and speculation.drafter_path is None

    def _with(self, **changes: dict[str, Any]) -> "RunConfig":
        """Changed values, by section."""
        sections = {name: getattr(self, name).model_copy(update=values) for name, values in changes.items()}
        return self.model_copy(update=sections)

    def with_drafter(self, folder: Path) -> "RunConfig":
        """The same run with this EAGLE-3 drafter at the start."""
        speculation = self.rollout.speculation.model_copy(update={"drafter_path": str(folder)})
        return self._with(rollout={"speculation": speculation})

    def for_reading(self) -> "RunConfig":
        """The same run for a command that trains nothing; the training may go on beside it."""
        return self._with(drafter={"idle_training": self.drafter.idle_training.model_copy(update={"enabled": False})})

    def with_engine(self, engine: str) -> "RunConfig":
        return self._with(rollout={"engine": engine})

    def with_dtypes(self, *, rollout: str, update: str, coldstart: str) -> "RunConfig":
        return self._with(rollout={"dtype": rollout}, update={"dtype": update}, coldstart={"dtype": coldstart})

    @property
    def why_not_streamed(self) -> str:
        """Why idle workers cannot compute passes of the policy update; empty where they can."""
        update, algorithm = self.update, self.algorithm
        if update.backend.kind != "torch":
            return "update.backend.kind is deepspeed, which adds gradients up in an order of its own"
        if update.num_minibatches * update.num_epochs > 1:
            return "update.num_minibatches or update.num_epochs is above 1, so most passes need a later policy"
        if algorithm.kl.coef > 0:
            return "algorithm.kl.coef is above 0, which needs the reference model's pass over all responses first"
        if algorithm.needs_all_groups:
            return f"algorithm.advantage is {algorithm.advantage}, which needs the rewards of all responses"
        if self.cluster.release_rollout_memory:
            return "cluster.release_rollout_memory is true, so there is no room for the update during the rollout"
        return ""

    @property
    def why_not_vllm(self) -> str:
        """Why vLLM cannot sample this run's responses on its workers' devices, and the remedy; empty where it can."""
        cluster, sharers = self.cluster, self.cluster.workers_per_gpu
        if sharers > 1:
            return (
                f"cluster.gpus_per_worker={cluster.gpus_per_worker:g}, {sharers} workers to a GPU: a vLLM engine wants "
                "one for itself; set gpus_per_worker to 1"
            )
        if cluster.release_rollout_memory and not cluster.gpus_per_worker:
            return (
                "cluster.release_rollout_memory=true: vLLM cannot sleep on a CPU; set cluster.release_rollout_memory "
                "to false"
            )
        return self.rollout.why_not_vllm

    def compares_with_plain(self, step: int) -> bool:
        """Is the step's rollout decoded plainly, too?  vLLM cannot turn its drafts off for a while."""
        every = self.evaluation.plain_every_steps if self.rollout.engine == "builtin" else 0
        return every > 0 and (step % every == 0 or step == self.num_steps)

    @model_validator(mode="after")
    def _engine_is_possible(self) -> "RunConfig":
        """`auto` is settled here where the configuration alone decides, else by `run/engine_choice`."""
        chosen = self.rollout.engine
        if chosen == "auto":
            divided = self.cluster.gpus_per_worker and self.rollout.vllm.tensor_parallel > 1
            can = self.cluster.gpus_per_worker and not self.why_not_vllm
            chosen = "vllm" if divided else "auto" if can else "builtin"
            # The section is frozen for its readers; it is not born yet here.
            object.__setattr__(self, "rollout", self.rollout.model_copy(update={"engine": chosen}))
        if chosen not in ("auto", "vllm"):
            if self.rollout.vllm.tensor_parallel > 1:
                raise ValueError(
                    f"rollout.vllm.tensor_parallel={self.rollout.vllm.tensor_parallel} with rollout.engine={chosen!r}: "
                    "it is not divided among workers; set rollout.engine to vllm, or tensor_parallel to 1"
                )
            return self
        if self.cluster.num_workers % self.rollout.vllm.tensor_parallel:
            raise ValueError(
                f"cluster.num_workers={self.cluster.num_workers} with rollout.vllm.tensor_parallel="
                f"{self.rollout.vllm.tensor_parallel}: engines share all workers evenly; set num_workers to a multiple"
            )
        if self.why_not_vllm:
            raise ValueError(f"rollout.engine='vllm' with {self.why_not_vllm}, or rollout.engine to builtin")
        return self

    @model_validator(mode="after")
    def _possible_together(self) -> "RunConfig":
        if self.rollout.num_samples == 1:  # every estimator subtracts a mean of the group
            raise ValueError(
                f"rollout.num_samples=1 with algorithm.advantage={self.algorithm.advantage!r}: a group of one has no "
                "baseline and every advantage would be 0; set rollout.num_samples to 2 or more"
            )
        if self.data.kind == "file" and any(f.kind == "reasoning_gym" for f in self.reward.functions):
            raise ValueError(
                "data.kind='file' with reward kind 'reasoning_gym': that scorer knows reasoning-gym tasks only and "
                "every response would score 0; set reward.functions to [{kind: math_verify}], [{kind: exact}] or your "
                "own function ({kind: python, path: 'package.module:function'})"
            )
        if self.rollout.environment is None and any(f.kind == "environment" for f in self.reward.functions):
            raise ValueError(
                "reward kind 'environment' without rollout.environment: every response would score 0; set "
                "rollout.environment to {path: 'package.module:Class'}, or choose another reward"
            )
        if self.rollout.temperature == 0:
            raise ValueError(
                "rollout.temperature=0: all greedy responses to a prompt are equal, so there is nothing to learn from; "
                "set rollout.temperature above 0 (validation has its own greedy pass)"
            )
        if self.update.num_minibatches > self.rollout.num_prompts:
            raise ValueError(
                f"update.num_minibatches={self.update.num_minibatches} exceeds rollout.num_prompts="
                f"{self.rollout.num_prompts}: minibatches are made of whole groups; lower update.num_minibatches"
            )
        if self.update.streamed in ("first", "last") and self.why_not_streamed:
            raise ValueError(
                f"update.streamed={self.update.streamed!r}: {self.why_not_streamed}; set update.streamed to auto or off"
            )
        if self.algorithm.overlong_buffer_tokens >= self.rollout.max_new_tokens:
            raise ValueError(
                f"algorithm.overlong_buffer_tokens={self.algorithm.overlong_buffer_tokens} must be below "
                f"rollout.max_new_tokens={self.rollout.max_new_tokens}, or every response would be penalised"
            )
        if self.update.lora.enabled and self.update.backend.kind == "deepspeed" and self.update.backend.zero_stage == 3:
            raise ValueError(
                "update.lora.enabled=true with update.backend.zero_stage=3: sharding the frozen weights is not "
                "supported; set update.backend.zero_stage to 2 or lower"
            )
        if self.cluster.shares_gpus and self.update.backend.kind == "deepspeed":
            raise ValueError(
                f"update.backend.kind='deepspeed' with cluster.gpus_per_worker={self.cluster.gpus_per_worker:g}, "
                f"{self.cluster.workers_per_gpu} workers to a GPU: DeepSpeed divides its state among GPUs over NCCL, "
                "which refuses two workers on one; set update.backend.kind to torch, or gpus_per_worker to 1"
            )
        return self
