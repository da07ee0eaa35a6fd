"""`tlt bench spot`: what training the drafter in idle time brings, and what it costs, over a whole training run.

    plain      no speculation
    static     adaptive speculation with the warm-up's drafter, never trained again
    adaptive   the same, and idle workers train the drafter

The three runs do the same steps from the same cold start, in turn, a block of steps each (a block is a resumed run), so
that a busy machine hits all alike.  Responses are the same up to near-ties in bfloat16.

Acceptance is measured on the responses of each block with the drafters as they were before it: chains along recorded
responses with their own noise, which is what the engine accepts (`drafter/eagle3_acceptance`).
"""

import json
import shutil
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from prefect import flow

from conf.schema import RunConfig
from flows._terminal import Terminal
from flows.benchmark import summarise, write_report
from flows.train import train
from tasks.coldstart import cold_start
from tasks.prepare import prepare_data, prepare_model
from tasks.warmup import warm_up_drafter
from tlt_core import checkpoint
from tlt_core.drafter.eagle3_acceptance import measure_acceptance
from tlt_core.drafter.eagle3_files import load_eagle3
from tlt_core.drafter.eagle3_sequence import HeadProbs, TrainSequence
from tlt_core.model.load import load_decoder
from tlt_core.spot.buffer import SequenceBuffer, StoredSequence
from tlt_core.spot.checkpoint import load_checkpoint

_MEASURED_ROWS = 2000  # starts of chains in one block
_FIGURES = (
    "timing_s/step",
    "timing_s/gen",
    "timing_s/update_actor",
    "timing_s/publish_drafter",
    "perf/overhead_share",
    "perf/rollout_share",
    "perf/rollout_tokens_per_s",
    "rollout/tail_ratio",
    "rollout/spec_accept_length",
    "rollout/spec_speedup_est",
    "bubble/idle_s",
    "bubble/harvested_s",
    "bubble/harvested_ratio",
    "bubble/preempt_ms_p95",
    "drafter/trained_tokens",
    "drafter/optimizer_steps",
    "drafter/version",
    "drafter/rejected",
    "drafter/canary_accept_length_before",
    "critic/rewards/mean",
)


@flow(name="bench-spot")
def bench_spot(cfg: RunConfig, *, repeats: int, out: Path, command: str) -> dict[str, Any]:
    """`repeats` blocks of steps, `num_steps` in all, for each of the three runs; returns the report."""
    first, decoder_dir = _first_drafter(cfg)
    runs = _runs(cfg, first)
    for run in runs.values():
        shutil.rmtree(run.run_dir, ignore_errors=True)
    block = -(-cfg.num_steps // repeats)
    names, acceptance = list(runs), []
    before = first
    for index in range(repeats):
        for name in names[index % 3 :] + names[: index % 3]:
            run = runs[name].model_copy(update={"num_steps": (index + 1) * block})
            train(run)
        acceptance.append(_acceptance(cfg, runs["adaptive"], decoder_dir, {"static": first, "adaptive": before}, block))
        kept = runs["adaptive"].run_dir / f"drafter_{(index + 1) * block:06d}"
        newest = checkpoint.newest_valid(runs["adaptive"].run_dir / "checkpoints")
        assert newest is not None, "the last step of a block is saved"
        before = shutil.copytree(newest / "drafter-eagle3", kept, dirs_exist_ok=True)
    steps = {name: _steps(run) for name, run in runs.items()}
    rows: list[dict[str, Any]] = [
        {"configuration": name, **summarise(steps[name], [f for f in _FIGURES if any(f in s for s in steps[name])])}
        for name in runs
    ]
    rows += [{"configuration": f"acceptance after {a['after_step']:.0f} steps"} | dict[str, Any](a) for a in acceptance]
    for run in runs.values():
        shutil.rmtree(run.run_dir / "checkpoints")
    return write_report(out, command=command, repeats=repeats, rows=rows, verdicts=_verdicts(steps, acceptance))


def _first_drafter(cfg: RunConfig) -> tuple[Path, Path]:
    """Folders of the warm-up's drafter, made once, and of the policy that it was made for."""
    with Terminal() as show:
        policy = prepare_model(cfg)
        dataset = prepare_data(cfg, policy)
        if cfg.coldstart.enabled:
            policy = cold_start(cfg, policy, dataset, show.stage).model_dir
        given = cfg.rollout.speculation.drafter_path
        folder = cfg.run_dir.with_name(f"bench-{cfg.name}") / "drafter-eagle3" if given is None else Path(given)
        if not folder.is_dir():
            warm_up_drafter(cfg, policy, dataset, folder, show.stage)
    return folder, policy


def _runs(cfg: RunConfig, drafter: Path) -> dict[str, RunConfig]:
    validation = cfg.evaluation.model_copy(update={"every_steps": 0})
    saving = cfg.checkpoint.model_copy(update={"every_steps": cfg.num_steps, "keep_last": 1, "keep_best": 0})
    tracking = cfg.tracking.model_copy(update={"register_models": False})
    changes = {"evaluation": validation, "checkpoint": saving, "tracking": tracking}
    base = cfg.model_copy(update=changes).with_drafter(drafter)
    off = base.rollout.speculation.model_copy(update={"policy": "off", "drafter_path": None})
    still = base.drafter.model_copy(update={"spot": base.drafter.spot.model_copy(update={"enabled": False})})
    idle = base.drafter.model_copy(update={"spot": base.drafter.spot.model_copy(update={"enabled": True})})
    runs = {
        "plain": base.model_copy(update={"rollout": base.rollout.model_copy(update={"speculation": off})}),
        "static": base.model_copy(update={"drafter": still}),
        "adaptive": base.model_copy(update={"drafter": idle}),
    }
    return {
        name: run.model_copy(
            update={"name": f"bench-{cfg.name}-{name}", "drafter": run.drafter.model_copy(update={"warmup": False})}
        )
        for name, run in runs.items()
    }


def _steps(run: RunConfig) -> list[dict[str, float]]:
    """Metrics of each step; a block's first one warms caches up again and is left out."""
    rows = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    attempts: dict[float, list[dict[str, float]]] = {}
    for row in rows:
        if row["step"] > 0:
            attempts.setdefault(row["training/resume_attempt"], []).append(row)
    return [row for own in attempts.values() for row in own[1:]]


def _acceptance(
    cfg: RunConfig, run: RunConfig, decoder_dir: Path, drafters: Mapping[str, Path], block: int
) -> dict[str, float]:
    """Acceptance lengths on the responses of the block that has just ended."""
    decoder = load_decoder(decoder_dir, dtype=getattr(torch, cfg.rollout.dtype))
    newest = checkpoint.newest_valid(run.run_dir / "checkpoints")
    assert newest is not None, "the last step of a block is saved"
    last = checkpoint.load_state(newest).step
    stored = [s for s in _stored(run) if last - block < s.step <= last]
    lengths: dict[str, float] = {"after_step": float(last - block), "responses": float(len(stored))}
    for name, folder in drafters.items():
        measured = measure_acceptance(
            load_eagle3(folder, decoder.config),
            decoder.embed_tokens.weight,
            [_sequence(s) for s in stored],
            depth=cfg.drafter.depth,
            temperature=cfg.rollout.temperature,
            top_p=cfg.rollout.top_p,
            top_k=cfg.rollout.top_k,
            max_rows=_MEASURED_ROWS,
            compute_dtype=decoder.head_weight.dtype,
        )
        lengths[f"accept_length_{name}"] = measured.accept_length
    return lengths


def _stored(run: RunConfig) -> list[StoredSequence]:
    """What the workers have kept of their responses."""
    found: list[StoredSequence] = []
    bounds = {"max_bytes": 1 << 40, "max_ram_bytes": 1 << 30, "max_sequences": 1 << 30}
    for folder in sorted((run.run_dir / "spot").glob("worker_*")):
        state = load_checkpoint(folder / "training.safetensors").values
        found += SequenceBuffer.open(folder, state["buffer"], **bounds).sequences()
    return found


def _sequence(stored: StoredSequence) -> TrainSequence:
    """Acceptance needs no probabilities, so there is no head."""
    probs = HeadProbs(stored.last_PD, stored.lognorms_P, stored.last_PD[:0])
    return TrainSequence(stored.tokens_L.long(), stored.taps_LE, probs, stored.first, stored.stream)


def _verdicts(
    steps: Mapping[str, Sequence[Mapping[str, float]]], acceptance: Sequence[Mapping[str, float]]
) -> list[dict[str, Any]]:
    def ratios(over: str, under: str, figure: str) -> list[float]:
        by_step = {row["step"]: row[figure] for row in steps[under]}
        return [row[figure] / by_step[row["step"]] for row in steps[over] if row["step"] in by_step]

    gained = [a["accept_length_adaptive"] / a["accept_length_static"] for a in acceptance[1:]] or [1.0]
    harvested = [row["bubble/harvested_ratio"] for row in steps["adaptive"] if "bubble/harvested_ratio" in row]
    stopped = [row["bubble/preempt_ms_p95"] for row in steps["adaptive"] if "bubble/preempt_ms_p95" in row]
    adaptive = [a["accept_length_adaptive"] for a in acceptance]
    return [
        _verdict("step time, plain over adaptive", ratios("plain", "adaptive", "timing_s/step"), 1.7),
        _verdict("rollout time, plain over adaptive", ratios("plain", "adaptive", "timing_s/gen"), 1.7),
        _verdict(
            "step time, training in idle time over none",
            ratios("adaptive", "static", "timing_s/step"),
            1.01,
            at_least=False,
        ),
        _verdict("acceptance length of the last block, adaptive over static", gained[-1:], 1.3),
        _verdict("acceptance length, adaptive: last over best block", [adaptive[-1] / max(adaptive)], 0.95),
        _verdict("idle seconds in windows over 0.5 s that trained", harvested or [0.0], 0.9),
        _verdict("pre-emption, p95 of a step, ms", stopped or [0.0], 250.0, at_least=False),
    ]


def _verdict(claim: str, values: Sequence[float], bound: float, *, at_least: bool = True) -> dict[str, Any]:
    value = statistics.median(values)
    holds = value >= bound if at_least else value <= bound
    return {"claim": claim, "value": value, "spread": [min(values), max(values)], "bound": bound, "holds": holds}
