"""Does a training run work on this machine's GPU at all?  The parts `run-...` of `tests/gpu_suite.py`.

    tlt train, two steps --> the same command, a third step --> what the run's own files say

The model is random and small, the reward is the share of lower-case letters, so that the policy really moves.  A slow
reward leaves each worker idle, so the drafter is trained.  All packages of TLT must be installed.
"""

import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
COMMON = [
    "model.hidden_size=256",  # heads of 64 channels
    "rollout.dtype=bfloat16",
    "update.dtype=bfloat16",
    "drafter.warmup=true",
    'reward.functions=[{kind: python, path: "tests.flows.length_reward:slow_length_reward"}]',
]
FIGURES = ("step", "perf/rollout_tokens_per_s", "perf/max_memory_gb", "timing_s/gen", "timing_s/update_actor")
PROBS_DIFF = 0.05  # rollout.max_probs_diff


class Run(NamedTuple):
    """One kind of run, and what it proves besides the rest."""

    options: list[str]
    proves: str
    workers: int = 1
    needs: tuple[str, ...] = ()


RUNS = {
    "run-own": Run(["rollout.engine=own"], "captured rounds, torch's update, streamed update"),
    "run-deepspeed": Run(
        ["rollout.engine=own", "update.backend={kind: deepspeed, zero_stage: 3, offload_optimizer: true}"],
        "ZeRO-3 with the optimizer in main memory, its sharded checkpoint",
        needs=("deepspeed",),
    ),
    "run-lora": Run(
        ["rollout.engine=own", "update.lora={rank: 8}"], "adapters, merged when they are published", needs=("peft",)
    ),
    "run-vllm": Run(["rollout.engine=vllm"], "the plug-in in vLLM, hidden states out of it, new weights into it"),
    "run-two-gpus": Run(
        ["rollout.engine=own", "update.backend={kind: deepspeed, zero_stage: 2}"],
        "NCCL between two workers, ZeRO-2",
        workers=2,
        needs=("deepspeed",),
    ),
}


def left_out(name: str, device: str) -> str:
    """Why this run cannot be made here; empty when it can."""
    run = RUNS[name]
    for package in ("pydantic", "prefect", "mlflow", "ray", *run.needs):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
    if name == "run-vllm" and not vllm_python().exists():
        return f"there is no vLLM at {vllm_python()}: make vllm-env, or set VLLM_PYTHON"
    if device == "cuda":
        import torch

        if torch.cuda.device_count() < run.workers:
            return f"it needs {run.workers} GPUs, {torch.cuda.device_count()} here"
    return ""


def vllm_python() -> Path:
    """As in `tlt_core.rollout.vllm.environment`, without what that imports."""
    return Path(os.environ.get("VLLM_PYTHON", ROOT / ".venv-vllm/bin/python")).absolute()


def run(name: str, device: str, folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Train, go on, and judge; rows and verdicts as in a benchmark's report.  folder: emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "flows.cli", "train", "conf/smoke.yaml", *COMMON, *RUNS[name].options]
    command += [f"cluster.num_workers={RUNS[name].workers}", f"cluster.gpus_per_worker={int(device == 'cuda')}"]
    command += ["name=run", f"output_dir={folder}", f"tracking.uri=sqlite:///{folder / 'mlflow.db'}"]
    own = {**os.environ, "PYTHONPATH": str(ROOT), "VLLM_PYTHON": str(vllm_python())}
    rows = []
    for steps in (2, 3):
        began_s = time.perf_counter()
        code = subprocess.run([*command, f"num_steps={steps}"], cwd=ROOT, env=own).returncode
        rows.append({"num_steps": steps, "exit_code": code, "seconds": time.perf_counter() - began_s})
    metrics = _metrics(folder / "run")
    rows += [{key: metrics[step][key] for key in FIGURES if key in metrics[step]} for step in sorted(metrics) if step]
    return rows, judged([row["exit_code"] for row in rows[:2]], metrics)


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
