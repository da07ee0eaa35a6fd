"""TRL's trainer in its own environment, driven step by step.  See `trl_process`."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.engines.environment import LineProcess, Peer, variables
from conf.load import ConfigError
from conf.run import RunConfig

_PROCESS = Path(__file__).with_name("trl_process.py")
_MOST_IN_A_PASS = 8  # responses of an update's pass; they are padded, and longer passes take more memory

TRL = Peer("trl", ("torch==2.13.0", "transformers==5.24.0", "trl==1.16.0", "accelerate==1.15.0", "datasets==5.2.0"))
_LOSSES = {"token_mean": "dapo", "sequence_mean": "grpo", "constant": "dr_grpo"}
_SCALES = {"grpo": "group", "dr_grpo": "none"}
Score = Callable[[Sequence[int], Sequence[str]], list[float]]


class TrlStep(NamedTuple):
    seconds: float
    rollout_s: float
    tokens: int
    lengths: list[int]  # of the responses, in the order of `rewards`
    rewards: list[float]


def arguments(cfg: RunConfig, *, num_steps: int, out: Path) -> dict[str, Any]:
    """GRPOConfig's, for the same algorithm.  Raises ConfigError where TRL has no counterpart."""
    algorithm, rollout, optimizer = cfg.algorithm, cfg.rollout, cfg.update.optimizer
    minibatches = cfg.update.num_minibatches
    if algorithm.advantage not in _SCALES or algorithm.dynamic_sampling or minibatches > 1:
        raise ConfigError(
            f"algorithm.advantage={algorithm.advantage}, dynamic_sampling={algorithm.dynamic_sampling}, update."
            f"num_minibatches={minibatches}: compared with TRL are grpo and dr_grpo without dynamic sampling, in one "
            "optimizer step; change these settings"
        )
    responses = rollout.num_prompts * rollout.num_samples
    in_a_pass = max(n for n in range(1, _MOST_IN_A_PASS + 1) if responses % n == 0)
    return {
        "output_dir": str(out),
        "max_steps": num_steps,
        "per_device_train_batch_size": in_a_pass,
        "gradient_accumulation_steps": responses // in_a_pass,
        "num_generations": rollout.num_samples,
        "max_completion_length": rollout.max_new_tokens,
        "temperature": rollout.temperature,
        "beta": algorithm.kl.coef,
        "epsilon": algorithm.clip_low,
        "epsilon_high": algorithm.clip_high,
        "loss_type": _LOSSES[algorithm.loss_aggregation],
        "scale_rewards": _SCALES[algorithm.advantage],
        "mask_truncated_completions": algorithm.mask_truncated,
        "learning_rate": optimizer.learning_rate,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": optimizer.schedule.warmup_steps,
        "weight_decay": optimizer.weight_decay,
        "adam_beta1": optimizer.betas[0],
        "adam_beta2": optimizer.betas[1],
        "adam_epsilon": optimizer.eps,
        "max_grad_norm": optimizer.max_grad_norm,
        "bf16": cfg.update.dtype == "bfloat16",
        "gradient_checkpointing": False,
        "shuffle_dataset": False,
        "seed": cfg.seed,
        "use_cpu": True,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


class Trl(LineProcess):
    """A trainer that waits before each of its steps.  Raises PeerError when it cannot go on."""

    def __init__(self, python: Path, settings: Mapping[str, Any], log: Path) -> None:
        command = [str(python), "-P", str(_PROCESS)]
        super().__init__("TRL's process", command, environment=variables(threads=settings["threads"]), log=log)
        self.versions: dict[str, str] = self.ask(settings)["ready"]

    def step(self, score: Score) -> TrlStep:
        asked = self.ask({"go": True})["score"]
        return TrlStep(**self.ask({"rewards": score(asked["rows"], asked["responses"])})["step"])
