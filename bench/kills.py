"""`tlt bench kills`: a run whose processes are killed again and again ends as the one that is left alone, to the bit.

Both are `tlt train` in processes of their own.  In one, every tenth step is struck at a moment of it that a seed draws:
a process is killed, and where that ends the run, the same command is started again.  Compared are the steps' tokens,
rewards, losses and gradients, and the weights at the end.  Useful share: time of the run left alone over the other's.
"""

import contextlib
import hashlib
import json
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
from tlt_core.items.store import write_atomically
from tlt_core.machine.doctor import machine
from tlt_core.run.summary import rows_of

_EVERY = 10  # steps
_VICTIMS = {  # in this order; a word of the process's name or command line, "" for the driver
    "a worker": "ray::Worker",
    "the driver": "",
    "Prefect's server": "uvicorn",
    "a scoring process": "multiprocessing",
    "the dispatcher": "ray::Dispatcher",
    "raylet": "raylet/raylet",
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
    plan = _plan(cfg.num_steps, seed=cfg.seed)
    peace, storm = (_own(cfg, name) for name in ("peace", "storm"))
    for run in (peace, storm):
        shutil.rmtree(run.run_dir, ignore_errors=True)  # an earlier benchmark would be resumed
    peace_s, _ = _train(peace, [])
    quiet = rows_of(peace.run_dir)
    storm_s, struck = _train(storm, plan, step_s=sum(row.get("timing_s/step", 0.0) for row in quiet) / cfg.num_steps)
    found = rows_of(storm.run_dir)
    same = {name: [row.get(name) for row in quiet] == [row.get(name) for row in found] for name in _COMPARED}
    same["weights"] = _weights(peace) == _weights(storm)
    figures = {"left alone s": peace_s, "killed s": storm_s, "kills": len(struck), "useful share": peace_s / storm_s}
    figures["step s"] = sum(row.get("timing_s/step", 0.0) for row in quiet) / cfg.num_steps
    figures["lost s a kill"] = (storm_s - peace_s) / len(struck)
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


def _train(run: RunConfig, plan: list[Kill], *, step_s: float = 0.0) -> tuple[float, list[Kill]]:
    """Seconds until the run has ended, and the kills.  Raises ValueError."""
    waiting, began_s = list(plan), time.perf_counter()
    struck: list[Kill] = []
    path = run.run_dir.with_name(f"{run.name}.yaml")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda partial: partial.write_text(json.dumps(run.model_dump(mode="json"))))
    log = path.with_suffix(".log")
    while True:
        before = len(struck)
        with log.open("a") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "flows.cli", "train", str(path)], stdout=file, stderr=file
            )
        try:
            while process.poll() is None:
                if waiting and _step(run, process.pid) == waiting[0].step:
                    time.sleep(waiting[0].moment * step_s)
                    if _kill(process.pid, waiting[0].victim):
                        struck.append(waiting.pop(0))
                time.sleep(_LOOK_S)
        finally:
            process.kill()
        if process.returncode == 0:
            return time.perf_counter() - began_s, struck
        if len(struck) == before:
            raise ValueError(f"the run ended by itself with code {process.returncode}: see {log}")


def _step(run: RunConfig, pid: int) -> int | None:
    """The step that the process is at."""
    with contextlib.suppress(OSError, ValueError):
        known = json.loads((run.run_dir / "status.json").read_text())
        return known["step"] if known["pid"] == pid else None
    return None


def _kill(driver: int, victim: str) -> bool:
    """Kill one of the run's processes of that kind.  False: there is none at this moment."""
    word = _VICTIMS[victim]
    with contextlib.suppress(psutil.NoSuchProcess):
        own = psutil.Process(driver)
        chosen = (
            [p for p in own.children(recursive=True) if word in " ".join([p.name(), *p.cmdline()])] if word else [own]
        )
        if chosen:
            chosen[-1].kill()
            return True
    return False


def _steps(rows: list[dict[str, float]]) -> list[float]:
    return [row["step"] for row in rows]


def _weights(run: RunConfig) -> str:
    return hashlib.sha256((run.run_dir / "policy" / "model.safetensors").read_bytes()).hexdigest()
