"""`tlt bench peers`: whole training steps of ours beside those of TRL's GRPOTrainer, on the same cores.

Equal are the start model, the prompts of each step, group size, longest response, temperature, algorithm, optimizer,
precision and the reward functions, which our processes compute for both.  Each samples with its own noise, so responses
differ: what the two learn is compared by `tlt bench learning`.  The first step of each warms up and does not count.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefect import flow

from bench.peers.trl import TrlStep, in_order, train_with_trl
from bench.report import write_report
from bench.runs import first_drafter, steps_of, take_turns, variants
from bench.verdicts import summarise, verdict
from conf.load import ConfigError
from conf.run import RunConfig
from tlt_core.grpo.reward import Scorer
from tlt_core.run.inputs import data_dir
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


@flow(name="bench-peers")
def bench_peers(cfg: RunConfig, *, repeats: int, out: Path, command: str) -> dict[str, Any]:
    """`num_steps` steps of each trainer; returns the report.  repeats: not used, steps are the repeats."""
    if cfg.num_steps < 2:
        raise ConfigError("num_steps=1: the first step of each trainer does not count; set num_steps to 2 or more")
    drafter, policy = first_drafter(cfg)
    prompts = Prompts.load(data_dir(cfg), policy, num_prompts=cfg.rollout.num_prompts)
    rows = in_order(cfg, prompts)
    work_dir = cfg.run_dir.with_name(f"bench-{cfg.name}-trl")
    with Scorer(cfg.reward) as scorer:
        theirs, versions = train_with_trl(cfg, policy, prompts, rows, scorer, work_dir=work_dir)
    every = variants(cfg, drafter)
    runs = {name: every[name] for name in _OURS}
    list(take_turns(runs, num_steps=cfg.num_steps, blocks=1))
    figures = _figures(theirs)[1:]
    report_rows = [
        *({"configuration": name, **summarise(steps_of(run), _FIGURES)} for name, run in runs.items()),
        {"configuration": "trl", **summarise(figures, _FIGURES), **versions},
    ]
    pairs = zip(steps_of(runs["tlt"]), figures, strict=True)
    ratios = [trl["timing_s/step"] / own["timing_s/step"] for own, trl in pairs]
    verdicts = [verdict("step time, TRL over TLT", ratios, _LEAST_FASTER)]
    return write_report(out, command=command, repeats=cfg.num_steps - 1, rows=report_rows, verdicts=verdicts)


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
