"""Whole steps on a GPU: the flow of stages e and f (`tests/gpu_runs.py`).  Runs take turns, a block of steps each.

Blocks follow each other as long as there is time; the first step of each warms up and does not count.  What is known is
written after every block.  Imported when Prefect's server has an address: Prefect reads it once.
"""

import itertools
import shutil
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from bench.runs import first_drafter, ratios, steps_of, variants
from bench.verdicts import summarise, verdict
from bench.written import written
from conf.run import RunConfig
from flows.train import train
from tests.gpu_report import Stage

_BLOCK = {"cuda": 3, "cpu": 2}  # steps
_FIGURES = (
    "timing_s/step", "timing_s/gen", "timing_s/update_actor", "perf/rollout_share", "perf/rollout_tokens_per_s",
    "response_length/p50", "response_length/p99", "response_length/clip_ratio", "rollout/spec_accept_length",
    "rollout/spec_active_frac", "idle/idle_s", "idle/harvested_s", "idle/streamed_s", "perf/max_memory_gb",
    "critic/rewards/mean", "rollout/checksum",
)  # fmt: skip
_BOUNDS = {  # over, under, at least (or at most)
    "step time, plain over TLT": ("plain", "tlt", 1.7, False),
    "step time, idle time unused over used": ("static", "tlt", 1.1, False),
    "step time, drafter trained in idle time over not": ("trained", "static", 1.02, True),
}


def in_turn(cfg: RunConfig, *, stage: Stage, names: Sequence[str]) -> None:
    """Blocks of steps of these variants, until the time is up; the report after each."""
    began_s = time.monotonic()
    drafter, _ = first_drafter(cfg)
    stage.report.add({"says": f"cold start and first drafter: {time.monotonic() - began_s:.0f} s"})
    runs = {name: run for name, run in variants(cfg, drafter).items() if name in names}
    for run in runs.values():
        shutil.rmtree(run.run_dir, ignore_errors=True)
    before, longest_s, block = list(stage.report.content["rows"]), 0.0, _BLOCK[stage.device]
    for turn in itertools.count():
        first = turn % len(names)
        for name in [*names[first:], *names[:first]]:
            began_s = time.monotonic()
            if turn and (stage.device == "cpu" or stage.left_s() < 1.2 * longest_s):
                return
            train(runs[name].model_copy(update={"num_steps": (turn + 1) * block}))
            longest_s = max(longest_s, time.monotonic() - began_s)
            done = {other: steps_of(run) for other, run in runs.items() if (run.run_dir / "metrics.jsonl").is_file()}
            stage.report.write([*before, *_rows(runs, done)], _verdicts(done))


def _rows(runs: Mapping[str, RunConfig], done: Mapping[str, Sequence[Mapping[str, float]]]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name, own in done.items():
        figures = [figure for figure in _FIGURES if any(figure in row for row in own)]
        median = {figure: statistics.median(row.get(figure, 0.0) for row in own) for figure in figures}
        says = (
            f"{name}: {len(own)} steps of {median['timing_s/step']:.1f} s: rollout {median['timing_s/gen']:.1f} s, "
            f"update {median['timing_s/update_actor']:.1f} s, "
            f"{median.get('perf/rollout_tokens_per_s', 0):.0f} tokens/s, accepted "
            f"{median.get('rollout/spec_accept_length', 1):.2f}, idle {median.get('idle/idle_s', 0):.1f} s"
        )
        rows.append({"configuration": name, "says": says, "steps": [_figures(row) for row in own]})
        rows[-1] |= summarise(own, figures)
    name, own = next(iter(done.items()))
    share = statistics.median(row["timing_s/gen"] / row["timing_s/step"] for row in own)
    lengths = written(runs[name])
    says = (
        f"{name}: rollout {share:.0%} of a step, {lengths['rollout with at most 4 live']:.0%} of it with at most 4 "
        f"live; lengths p50 {lengths['length p50']:.0f}, p99 {lengths['length p99']:.0f}, "
        f"most {lengths['length max']:.0f}"
    )
    return [*rows, {"configuration": "responses", "says": says, "rollout share": share, **lengths}]


def _figures(row: Mapping[str, float]) -> dict[str, float]:
    return {"step": row["step"]} | {figure: row[figure] for figure in _FIGURES if figure in row}


def _verdicts(done: Mapping[str, Sequence[Mapping[str, float]]]) -> list[dict[str, Any]]:
    verdicts = []
    for claim, (over, under, bound, at_most) in _BOUNDS.items():
        if found := ratios(done.get(over, []), done.get(under, []), "timing_s/step"):
            verdicts.append(verdict(claim, found, bound, at_most=at_most))
    return verdicts
