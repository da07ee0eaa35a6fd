"""`tlt bench kills`: a run whose processes are killed again and again ends as the one that is left alone, to the bit.

Both are `tlt train` in processes of their own, from the same cold start.  In one, a process is killed in one of every
ten steps, at a moment that a seed draws; where that ends the run, the same command is started again.  Compared are the
steps' tokens, rewards, losses and gradients, and the weights at the end.  Useful share: time of the run left alone over
the other's.
"""

import hashlib
import json
import math
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from bench.report import write_report
from bench.verdicts import summarise, verdict
from conf.run import RunConfig
from flows._terminal import Terminal
from flows.status import STATUS
from tasks.stages import cold_start, prepare_data, prepare_model
from tlt_core.items.store import write_atomically
from tlt_core.machine.doctor import machine
from tlt_core.run.summary import rows_of

_EVERY = 10  # steps
_VICTIMS = {  # in turn; a word of the process's name or command line, "" for the driver
    "a worker": "ray::Worker",
    "Prefect's server": "uvicorn",
    "a scoring process": "multiprocessing.spawn",
    "the dispatcher": "ray::Dispatcher",
    "raylet": "raylet/raylet",
    "the driver": "",
}
_COMPARED = ("rollout/checksum", "critic/rewards/mean", "actor/pg_loss", "actor/grad_norm")
_LOOK_S = 0.05
_USEFUL = 0.8  # a public system, at the same share of disturbed steps


class Kill(NamedTuple):
    victim: str
    step: int
    moment: float  # of the step, from 0 to 1


def bench_kills(cfg: RunConfig, *, repeats: int, out: Path, command: str) -> dict[str, Any]:
    """repeats: not used; a run is disturbed once in every ten steps.  Raises ValueError where a run fails by itself."""
    with Terminal() as show:  # made once: the second run would find it, and look faster
        model = prepare_model(cfg)
        dataset = prepare_data(cfg, model)
        if cfg.coldstart.enabled:
            cold_start(cfg, model, dataset, show.stage)
    peace, storm = (_own(cfg, name) for name in ("peace", "storm"))
    for run in (peace, storm):
        if run.run_dir.exists():  # an earlier benchmark would be resumed
            shutil.rmtree(run.run_dir)
    peace_s, _ = _train(peace, [], step_s=0.0)
    quiet = rows_of(peace.run_dir)
    step_s = sum(row.get("timing_s/step", 0.0) for row in quiet) / cfg.num_steps
    storm_s, struck = _train(storm, _plan(cfg.num_steps, seed=cfg.seed), step_s=step_s)
    found = rows_of(storm.run_dir)
    same = {name: [row.get(name) for row in quiet] == [row.get(name) for row in found] for name in _COMPARED}
    same["weights"] = _weights(peace) == _weights(storm)
    figures = {"left alone s": peace_s, "killed s": storm_s, "step s": step_s, "kills": len(struck)}
    figures["lost s a kill"] = (storm_s - peace_s) / max(len(struck), 1)
    row = {"configuration": cfg.name, "killed": ", ".join(f"{k.victim} in step {k.step}" for k in struck)}
    return write_report(
        out,
        command=command,
        repeats=1,
        rows=[{**row, **summarise([figures])}],
        verdicts=[
            *(verdict(f"{name}: equal to the bit", [float(equal)], 1.0) for name, equal in same.items()),
            verdict("all steps are recorded once, in order", [float(_steps(found) == _steps(quiet))], 1.0),
            verdict("steps of ten that are struck", [len(struck) / cfg.num_steps * _EVERY], 1.0),
            verdict("useful share of the time", [peace_s / storm_s], _USEFUL),
        ],
    )


def _plan(num_steps: int, *, seed: int) -> list[Kill]:
    """One kill in each ten steps; the last ten may be fewer."""
    chance = random.Random(seed)
    kills: list[Kill] = []
    for first in range(1, num_steps + 1, _EVERY):
        step = chance.randint(first, min(first + _EVERY - 1, num_steps))
        kills.append(Kill([*_VICTIMS][len(kills) % len(_VICTIMS)], step, chance.random()))
    return kills


def _own(cfg: RunConfig, name: str) -> RunConfig:
    """Checkpoints after each step; with torch's kernels, what makes runs equal to the bit (architecture.md)."""
    changes: dict[str, Any] = {
        "name": f"bench-{cfg.name}-{name}",
        "checkpoint": cfg.checkpoint.model_copy(update={"every_steps": 1}),
        "tracking": cfg.tracking.model_copy(update={"register_models": False}),
    }
    if machine()["cpu_kernels"] == "torch" or cfg.rollout.dtype != "bfloat16":
        off = cfg.rollout.speculation.model_copy(update={"policy": "off"})
        changes["rollout"] = cfg.rollout.model_copy(update={"speculation": off, "dispatch": "static"})
    return cfg.model_copy(update=changes)


def _train(run: RunConfig, plan: list[Kill], *, step_s: float) -> tuple[float, list[Kill]]:
    """Seconds until the run has ended, and the kills, with the steps that they struck.  Raises ValueError."""
    waiting, began_s = list(plan), time.perf_counter()
    struck: list[Kill] = []
    path = run.run_dir.with_name(f"{run.name}.yaml")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda partial: partial.write_text(json.dumps(run.model_dump(mode="json"))))
    log = path.with_suffix(".log")
    while True:
        before, due_s = len(struck), math.inf
        with log.open("a") as file:
            command = [sys.executable, "-m", "flows.cli", "train", str(path)]
            process = subprocess.Popen(command, stdout=file, stderr=file)
        try:
            while process.poll() is None:
                time.sleep(_LOOK_S)
                step = _step(run, process)
                if waiting and step >= waiting[0].step:
                    due_s = min(due_s, time.perf_counter() + waiting[0].moment * step_s)
                    if time.perf_counter() >= due_s:
                        victim = _kill(process, waiting[0].victim)
                        struck.append(waiting.pop(0)._replace(step=step, victim=victim))
                        due_s = math.inf
        finally:
            process.kill()
        if process.returncode == 0:
            return time.perf_counter() - began_s, struck
        if len(struck) == before:
            raise ValueError(f"the run ended by itself with code {process.returncode}: see {log}")


def _step(run: RunConfig, process: "subprocess.Popen[bytes]") -> int:
    """The step that the process is at; 0 before the first."""
    path = run.run_dir / STATUS  # which is replaced as a whole
    known = json.loads(path.read_text()) if path.is_file() else {}
    return known.get("step") or 0 if known.get("pid") == process.pid else 0


def _kill(driver: "subprocess.Popen[bytes]", wanted: str) -> str:
    """Kill one of the run's processes of that kind, or, where it has none (a server of Prefect that was there before is
    not the run's), of the next kind; returns which."""
    family = {process.pid for process in psutil.Process(driver.pid).children(recursive=True)}
    listed = [p for p in psutil.process_iter(["name", "cmdline"]) if p.pid in family]
    kinds = [*_VICTIMS]
    for victim in kinds[kinds.index(wanted) :]:
        for process in listed:
            words = " ".join([process.info["name"], *(process.info["cmdline"] or ())])
            if _VICTIMS[victim] and _VICTIMS[victim] in words and process.is_running():
                process.kill()
                return victim
    driver.kill()
    return kinds[-1]


def _steps(rows: list[dict[str, float]]) -> list[float]:
    return [row["step"] for row in rows]


def _weights(run: RunConfig) -> str:
    return hashlib.sha256((run.run_dir / "policy" / "model.safetensors").read_bytes()).hexdigest()
