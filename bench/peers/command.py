"""`tlt bench peers`: whole training steps of ours beside those of TRL's GRPOTrainer, on the same cores.

Equal are the start model, the prompts of each step, group size, longest response, temperature, algorithm, optimizer,
precision and the rewards, which our processes compute for both.  The noise is not, so responses differ.  The first step
of each warms up and does not count for the time.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from prefect import flow

from bench.engines import environment
from bench.peers.trl import TRL, Trl, TrlStep, arguments
from bench.report import write_report
from bench.runs import first_drafter, steps_of, take_turns, variants
from bench.verdicts import summarise, verdict
from conf.load import ConfigError
from conf.run import RunConfig
from flows._heartbeat import Heartbeat
from tlt_core.data.prompt_order import PromptOrder
from tlt_core.grpo.reward import Scorer
from tlt_core.items.store import load_scored
from tlt_core.items.types import Prompt
from tlt_core.run.inputs import artifacts_dir, data_dir
from tlt_core.run.prompts import Prompts

_OURS = ("plain", "tlt")
_FIGURES = (
    "timing_s/step",
    "timing_s/gen",
    "timing_s/update_actor",
    "perf/rollout_tokens_per_s",
    "response_length/mean",
    "critic/rewards/mean",
)
_LEAST_FASTER = 6.0
_MOST_WORSE = 0.05  # reward; with few prompts the error alone is larger, and nothing is shown


@flow(name="bench-peers")
def bench_peers(cfg: RunConfig, *, repeats: int, out: Path, command: str) -> dict[str, Any]:
    """`num_steps` steps of each trainer; returns the report.  repeats: not used, steps are the repeats."""
    if cfg.num_steps < 2:
        raise ConfigError("num_steps=1: the first step of each trainer does not count; set num_steps to 2 or more")
    drafter, policy = first_drafter(cfg)
    work_dir = cfg.run_dir.with_name(f"bench-{cfg.name}-trl")
    work_dir.mkdir(parents=True, exist_ok=True)
    python = environment.interpreter(TRL, artifacts_dir() / "peers")
    prompts = Prompts.load(data_dir(cfg), policy, num_prompts=cfg.rollout.num_prompts)
    order = PromptOrder(prompts.train, seed=cfg.seed)
    rows = [prompt for _ in range(cfg.num_steps) for prompt in order.take(cfg.rollout.num_prompts)]
    token_ids = [prompt.tokens.tolist() for prompt in rows]
    settings = {
        "model": str(policy),
        "threads": cfg.cluster.num_workers * cfg.cluster.threads_per_worker,
        "weights": "float32",
        "prompts": [prompts.tokenizer.decode(ids) for ids in token_ids],
        "token_ids": token_ids,
        "arguments": arguments(cfg, num_steps=cfg.num_steps, out=work_dir),
    }
    theirs: list[TrlStep] = []
    began_s = time.monotonic()

    def progress() -> str:
        return f"TRL: {len(theirs)} of {cfg.num_steps} steps, {time.monotonic() - began_s:.0f} s so far"

    with (
        closing(Trl(python, settings, work_dir / "log.txt")) as trl,
        Scorer(cfg.reward) as scorer,
        Heartbeat(progress),
    ):
        while len(theirs) < cfg.num_steps:
            theirs.append(trl.step(lambda at, texts: _score(scorer, rows, at, texts)))
        versions = trl.versions
    every = variants(cfg, drafter)
    runs = {name: every[name] for name in _OURS}
    list(take_turns(runs, num_steps=cfg.num_steps, blocks=1))
    gains, figures = _reward_gains(runs["tlt"], rows, theirs), _figures(theirs)[1:]
    report_rows = [
        *({"configuration": name, **summarise(steps_of(run), _FIGURES)} for name, run in runs.items()),
        {"configuration": "trl", **summarise(figures, _FIGURES), **versions},
        {"configuration": "reward, tlt minus trl", **gains},
    ]
    verdicts = _verdicts(steps_of(runs["tlt"]), figures, gains)
    return write_report(out, command=command, repeats=cfg.num_steps - 1, rows=report_rows, verdicts=verdicts)


def _score(scorer: Scorer, rows: Sequence[Prompt], at: Sequence[int], texts: Sequence[str]) -> list[float]:
    for index, (row, text) in enumerate(zip(at, texts, strict=True)):
        scorer.submit(index, rows[row], text)
    return [score.total for score in scorer.collect(range(len(texts)))]


def _figures(steps: Sequence[TrlStep]) -> list[dict[str, float]]:
    """TRL's steps under the names of our metrics."""
    return [
        {
            "timing_s/step": step.seconds,
            "timing_s/gen": step.rollout_s,
            "timing_s/update_actor": step.seconds - step.rollout_s,
            "perf/rollout_tokens_per_s": step.tokens / step.rollout_s,
            "response_length/mean": statistics.fmean(step.lengths),
            "critic/rewards/mean": statistics.fmean(step.rewards),
        }
        for step in steps
    ]


def _reward_gains(run: RunConfig, rows: Sequence[Prompt], theirs: Sequence[TrlStep]) -> dict[str, float]:
    """Mean over all prompts of all steps of the difference between the groups' mean rewards, and its standard error."""
    differences: list[float] = []
    size = run.rollout.num_samples
    for index, prompt in enumerate(rows):
        step, group = divmod(index, run.rollout.num_prompts)
        scored = load_scored(run.run_dir / "steps" / f"{step + 1:06d}" / "scored.safetensors")
        own = float(scored.scores_R[scored.rollouts.prompt_ids_R == prompt.id].mean())
        differences.append(own - statistics.fmean(theirs[step].rewards[group * size : (group + 1) * size]))
    error = statistics.stdev(differences) / len(differences) ** 0.5
    return {"mean": statistics.fmean(differences), "standard_error": error, "prompts": float(len(differences))}


def _verdicts(
    ours: Sequence[Mapping[str, float]], theirs: Sequence[Mapping[str, float]], gains: Mapping[str, float]
) -> list[dict[str, Any]]:
    ratios = [b["timing_s/step"] / a["timing_s/step"] for a, b in zip(ours, theirs, strict=True)]
    claim = "reward after equal steps, TLT minus TRL, less two standard errors"
    return [
        verdict("step time, TRL over TLT", ratios, _LEAST_FASTER),
        verdict(claim, [gains["mean"] - 2 * gains["standard_error"]], -_MOST_WORSE),
    ]
