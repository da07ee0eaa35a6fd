"""`tlt bench soak`: a long run in which something breaks every few steps, beside the same run in peace.

    calm     one process from beginning to end; its memory, open files, threads and disk space are watched
    storm    faults at random moments (seed of the configuration); when the run has ended it is started again

Both decode plainly in float32 with requests dealt beforehand, so the trained policy must be the same to the bit.
"""

import hashlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import psutil
import yaml

from bench.report import write_report
from bench.verdicts import verdict
from conf.run import RunConfig
from tlt_core.items.store import write_atomically

matplotlib.use("Agg")
from matplotlib import pyplot

_LOOK_S = 2.0
_QUIET_STEPS = (4, 20)  # between two faults: at least, at most; steps, so that a slow machine gets as many
_WITHIN_S = 3.0  # after a step's end, so that any phase of a step can be struck
_PAUSE_S = 6.0  # of a stopped worker
_MOST_STARTS = 200
_GROWTH = 1.05  # memory at the end over memory when everything has been loaded and used
_WARM, _WINDOW = 0.25, 0.2  # of the run: what is no growth yet; what is compared with the end


class Fault(NamedTuple):
    """One that happened."""

    kind: str
    at_step: int
    ended_run: bool


def bench_soak(cfg: RunConfig, *, repeats: int, out: Path, command: str) -> dict[str, Any]:
    """Write the report and its plot.  repeats: not used; more steps are a longer soak."""
    folder = Path(cfg.output_dir) / f"soak-{cfg.name}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    calm, samples = _calm(_config(cfg, "calm", folder))
    storm, faults = _storm(_config(cfg, "storm", folder), random.Random(cfg.seed))
    _draw(samples, out.with_suffix(".png"))
    expected = list(range(cfg.num_steps + 1))
    counted = Counter(fault.kind for fault in faults)
    fatal = Counter(fault.kind for fault in faults if fault.ended_run)
    rows: list[dict[str, Any]] = [
        {"configuration": kind, "faults": counted[kind], "ended the run": fatal[kind]} for kind in sorted(counted)
    ]
    rows.append({"configuration": "calm", **{f"{k}, end over start": _growth(samples, k) for k in _WATCHED}})
    verdicts = [
        verdict("faults", [len(faults)], min(20, cfg.num_steps // 10)),
        verdict("the trained policy is the same to the bit with and without faults", [calm.sha256 == storm.sha256], 1),
        verdict("every step is recorded once, in order", [calm.steps == expected and storm.steps == expected], 1),
        verdict("share of steps with the same rewards", [_share_equal(calm.rewards, storm.rewards)], 1),
    ]
    for name in _WATCHED:
        grown = _growth(samples, name)
        verdicts.append(verdict(f"{name} at the end over the first half", [grown], _GROWTH, at_most=True))
    return write_report(out, command=command, repeats=1, rows=rows, verdicts=verdicts)


# ---------------------------------------------------------------------------------------------- the two runs


class Outcome(NamedTuple):
    """What a run has left."""

    sha256: str  # of the policy
    steps: list[int]
    rewards: list[float]


class Sample(NamedTuple):
    """The run's processes at one moment."""

    at_s: float
    step: int
    memory: float  # bytes of driver, workers and dispatcher; shared pages count in part
    files: float
    threads: float
    disk: float  # bytes of checkpoints and step files


_WATCHED = ("memory", "files", "threads", "disk")


def _config(cfg: RunConfig, name: str, folder: Path) -> Path:
    """File of a run that is exact to the bit and draws no figures, which would fill the disk by design."""
    tree = cfg.model_dump(mode="json")
    tree |= {"name": name, "output_dir": str(folder)}
    tree["rollout"] |= {"dtype": "float32", "dispatch": "static"}
    tree["rollout"]["speculation"]["policy"] = "off"
    tree["update"]["dtype"] = tree["coldstart"]["dtype"] = "float32"
    tree["tracking"] |= {"uri": f"sqlite:///{folder}/mlflow.db", "figure_every_steps": cfg.num_steps}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    return path


def _start(config: Path) -> "subprocess.Popen[bytes]":
    environment = {**os.environ, "PREFECT_HOME": str(config.parent / "prefect")}
    environment.pop("PREFECT_API_URL", None)  # of this benchmark's own server
    with config.with_suffix(".log").open("a") as log:
        command = [sys.executable, "-m", "flows.cli", "train", str(config)]
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)


def _calm(config: Path) -> tuple[Outcome, list[Sample]]:
    process, samples = _start(config), list[Sample]()
    began_s = time.monotonic()
    while process.poll() is None:
        step = _steps_done(config.with_suffix(""))
        if step:
            samples += _sample(process.pid, config.with_suffix(""), step, time.monotonic() - began_s)
        time.sleep(_LOOK_S)
    _require(process.returncode == 0, config, f"exit code {process.returncode} in peace")
    return _outcome(config.with_suffix("")), samples


def _storm(config: Path, chance: random.Random) -> tuple[Outcome, list[Fault]]:
    faults: list[Fault] = []
    next_at = chance.randint(*_QUIET_STEPS)
    for _ in range(_MOST_STARTS):
        process = _start(config)
        while process.poll() is None:
            _wait(process, chance.uniform(0, _WITHIN_S))
            step = _steps_done(config.with_suffix(""))
            if process.poll() is None and step >= next_at:
                kind = chance.choice(sorted(_FAULTS))
                if _FAULTS[kind](process.pid, chance):
                    while process.poll() is None and _steps_done(config.with_suffix("")) <= step + 1:
                        _wait(process, _LOOK_S)  # it ends, or goes on
                    faults.append(Fault(kind, step, process.poll() is not None))
                    next_at = step + chance.randint(*_QUIET_STEPS)
        if process.returncode == 0:
            return _outcome(config.with_suffix("")), faults
    _require(False, config, f"it has not ended after {_MOST_STARTS} starts")
    raise AssertionError


def _wait(process: "subprocess.Popen[bytes]", seconds: float) -> None:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return


def _require(holds: bool, config: Path, problem: str) -> None:
    if not holds:
        raise RuntimeError(f"the run of {config}: {problem}; its output is in {config.with_suffix('.log')}")


# ---------------------------------------------------------------------------------------------- faults


def _kill_driver(driver: int, _: random.Random) -> bool:
    os.kill(driver, signal.SIGKILL)
    return True


def _stop_driver(driver: int, _: random.Random) -> bool:
    os.kill(driver, signal.SIGTERM)
    return True


def _on(name: str, act: Callable[[psutil.Process], None]) -> Callable[[int, random.Random], bool]:
    """A fault of one of the run's processes whose command line has `name`; False: there is none just now."""

    def strike(driver: int, chance: random.Random) -> bool:
        found = [p for p in _family(driver) if name in " ".join(_command(p))]
        if not found:
            return False
        try:
            act(chance.choice(found))
        except psutil.NoSuchProcess:
            return False
        return True

    return strike


def _pause(process: psutil.Process) -> None:
    process.suspend()
    time.sleep(_PAUSE_S)
    process.resume()


_FAULTS: Mapping[str, Callable[[int, random.Random], bool]] = {
    "driver killed": _kill_driver,
    "driver told to stop (SIGTERM)": _stop_driver,
    "worker killed": _on("ray::Worker", psutil.Process.kill),
    "worker paused for 6 s": _on("ray::Worker", _pause),
    "dispatcher killed": _on("ray::Dispatcher", psutil.Process.kill),
    "raylet killed": _on("raylet/raylet", psutil.Process.kill),
    "Prefect's server killed": _on("prefect.server.api", psutil.Process.kill),
    "scoring process killed": _on("spawn_main", psutil.Process.kill),
}


def _family(driver: int) -> list[psutil.Process]:
    try:
        return psutil.Process(driver).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return []


# ---------------------------------------------------------------------------------------------- what is left


def _steps_done(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return max(0, path.read_text().count("\n") - 1) if path.is_file() else 0  # without step 0


def _sample(driver: int, run_dir: Path, step: int, at_s: float) -> list[Sample]:
    """Nothing where a process has just ended."""
    own = [p for p in _family(driver) if any("ray::" in word for word in _command(p))]
    try:
        watched = [psutil.Process(driver), *own]
        memory = sum(p.memory_full_info().pss for p in watched)
        files, threads = sum(p.num_fds() for p in watched), sum(p.num_threads() for p in watched)
    except psutil.NoSuchProcess:
        return []
    disk = sum(_size(path) for part in ("checkpoints", "steps", "spot") for path in (run_dir / part).rglob("*"))
    return [Sample(at_s, step, memory, files, threads, disk)]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _growth(samples: Sequence[Sample], name: str) -> float:
    """Median of the last fifth of the run over that of a fifth before its middle."""
    last = max(s.step for s in samples)

    def median(begin: float) -> float:
        return statistics.median(
            getattr(s, name) for s in samples if begin * last <= s.step <= (begin + _WINDOW) * last
        )

    return median(1 - _WINDOW) / median(_WARM)


def _outcome(run_dir: Path) -> Outcome:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    weights = (run_dir / "policy" / "model.safetensors").read_bytes()
    rewards = [row["critic/rewards/mean"] for row in rows if row["step"] > 0]
    return Outcome(hashlib.sha256(weights).hexdigest(), [row["step"] for row in rows], rewards)


def _share_equal(first: Sequence[float], second: Sequence[float]) -> float:
    return sum(a == b for a, b in zip(first, second, strict=False)) / max(len(first), len(second))


def _draw(samples: Sequence[Sample], path: Path) -> None:
    figure, axes = pyplot.subplots(len(_WATCHED), 1, figsize=(8, 8), sharex=True)
    for axis, name in zip(axes, _WATCHED, strict=True):
        axis.plot([s.step for s in samples], [getattr(s, name) for s in samples])
        axis.set_ylabel(name)
        axis.set_ylim(bottom=0)
    axes[-1].set_xlabel("RL step")
    figure.tight_layout()
    write_atomically(path, lambda partial: figure.savefig(partial, format="png", dpi=100))
    pyplot.close(figure)
