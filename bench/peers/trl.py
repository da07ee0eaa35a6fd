"""TRL's trainer in its own environment, driven step by step.  See `trl_process`."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from bench.engines.environment import LineProcess, Peer, interpreter, variables
from conf.load import ConfigError
from conf.run import RunConfig
from flows._heartbeat import Heartbeat
from tlt_core.data.prompt_order import PromptOrder
from tlt_core.grpo.reward import Scorer
from tlt_core.items.types import NoiseKey, Prompt
from tlt_core.model.sampling import stream_key
from tlt_core.run.inputs import artifacts_dir
from tlt_core.run.prompts import Prompts

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
    responses: list[list[int]]  # token ids


def in_order(cfg: RunConfig, prompts: Prompts) -> list[Prompt]:
    """The prompts of all steps, as our run takes them."""
    order = PromptOrder(prompts.train, seed=cfg.seed)
    return [prompt for _ in range(cfg.num_steps) for prompt in order.take(cfg.rollout.num_prompts)]


def train_with_trl(
    cfg: RunConfig,
    policy: Path,
    prompts: Prompts,
    rows: Sequence[Prompt],
    scorer: Scorer,
    *,
    work_dir: Path,
    own_noise: bool = True,
) -> tuple[list[TrlStep], dict[str, str]]:
    """All steps of TRL's trainer on `rows`, scored by `scorer`; and its versions.  own_noise: False: TRL samples with
    our noise, and the trained model is saved in `work_dir`.  Raises PeerError, ConfigError."""
    work_dir.mkdir(parents=True, exist_ok=True)
    python = interpreter(TRL, artifacts_dir() / "peers")
    token_ids = [prompt.tokens.tolist() for prompt in rows]
    settings: dict[str, Any] = {
        "model": str(policy),
        "threads": cfg.cluster.num_workers * cfg.cluster.threads_per_worker,
        "weights": "float32",
        "prompts": [prompts.tokenizer.decode(ids) for ids in token_ids],
        "token_ids": token_ids,
        "arguments": arguments(cfg, num_steps=cfg.num_steps, out=work_dir),
    }
    if not own_noise:
        settings |= {"code": str(Path(__file__).parents[2]), "streams": _streams(cfg, rows)}
    steps: list[TrlStep] = []
    began_s = time.monotonic()

    def progress() -> str:
        return f"TRL: {len(steps)} of {cfg.num_steps} steps, {time.monotonic() - began_s:.0f} s so far"

    def score(at: Sequence[int], texts: Sequence[str]) -> list[float]:
        for index, (row, text) in enumerate(zip(at, texts, strict=True)):
            scorer.submit(index, rows[row], text)
        return [score.total for score in scorer.collect(range(len(texts)))]

    with closing(Trl(python, settings, work_dir / "log.txt")) as trl, Heartbeat(progress):
        while len(steps) < cfg.num_steps:
            steps.append(trl.step(score))
        trl.end()
        return steps, trl.versions


def _streams(cfg: RunConfig, rows: Sequence[Prompt]) -> list[list[int]]:
    """Of each step: the keys of its responses, in TRL's order."""
    size, samples = cfg.rollout.num_prompts, range(cfg.rollout.num_samples)
    return [
        [
            stream_key(NoiseKey(cfg.seed, step + 1, p.id, s))
            for p in rows[step * size : (step + 1) * size]
            for s in samples
        ]
        for step in range(cfg.num_steps)
    ]


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
    schedule = optimizer.schedule
    if schedule.kind != "constant" or schedule.warmup_steps > 1:
        raise ConfigError(
            f"update.optimizer.schedule={schedule}: compared with TRL is a constant rate, since transformers' warm-up "
            "begins with a rate of 0 and ours does not; change these settings"
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
        "lr_scheduler_type": "constant",
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

    def end(self) -> None:
        """Wait until the trainer has ended and saved what it saves."""
        self.ask({"go": False})
