"""A training run as processes: it is started, its driver is held within a phase, and what it leaves is compared.

The driver writes the phase to `status.json` as it enters it.  `hold` stops the driver (SIGSTOP) there and looks again:
if the phase is still the same, a fault can strike for certain within it.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

NUM_STEPS = 30
SILENCE_S = 30.0  # `cluster.silence_s`
_KEPT = 3  # checkpoints
_LOOK_S = 0.002
_DELAY_S = 0.03  # into a phase, at most
NOISE = ("Traceback", "SIGABRT", "Stack trace", "core_worker", "terminate called", "Exception ignored", "*** ")


def settings(reference: bool = False) -> list[str]:
    return [
        f"num_steps={NUM_STEPS}",
        "coldstart.num_examples=64",
        "rollout.dispatch=static",
        "rollout.speculation.policy=off",
        "rollout.max_new_tokens=48",
        "update.optimizer.learning_rate=1e-3",
        f"checkpoint.keep_last={1000 if reference else _KEPT}",
        "checkpoint.keep_best=0",
        "tracking.figure_every_steps=1000",
        "tracking.system_metrics=false",
        f"cluster.silence_s={SILENCE_S}",
        'reward.functions=[{kind: python, path: "tests.faults.rewards:patient"}]',
    ]


class Run:
    """One run's folder, and the process that is at work in it now."""

    def __init__(self, folder: Path, name: str, *, home: Path, prefect: Path, uri: str, more: Sequence[str]) -> None:
        self.dir, self.name, self.home, self.prefect = folder / name, name, home, prefect
        self.log = prefect.parent / f"{name}.log"
        self._settings = [f"name={name}", f"output_dir={folder}", f"tracking.uri={uri}", *more]
        self._said_from = 0
        self.process: subprocess.Popen[bytes] | None = None

    # ------------------------------------------------------------------------------------------ the process

    def start(self) -> "subprocess.Popen[bytes]":
        self._said_from = self.log.stat().st_size if self.log.is_file() else 0
        self.process = self.spawn(self.log)
        return self.process

    def spawn(self, log: Path, environment: Mapping[str, str] | None = None) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "flows.cli", "train", "conf/smoke.yaml", *self._settings]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PREFECT_HOME": str(self.prefect), "TLT_HOME": str(self.home)}
        env.pop("PREFECT_API_URL", None)
        with log.open("a") as file:
            return subprocess.Popen(command, env={**env, **(environment or {})}, stdout=file, stderr=file)

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def has_finished(self) -> bool:
        return self.process is not None and self.process.poll() == 0

    def said(self) -> str:
        return self.log.read_bytes()[self._said_from :].decode(errors="replace")

    def family(self, name: str = "") -> list[psutil.Process]:
        """Its child processes whose name or command line has `name`."""
        try:
            children = psutil.Process(self.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        return [child for child in children if not name or name in called(child)]

    def kill(self) -> None:
        if self.process is None:
            return
        children = self.family()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for child in left(children, within_s=30):
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended by itself
                child.kill()

    # ------------------------------------------------------------------------------------------ where it is

    def status(self) -> dict[str, Any]:
        """Of this process; empty while it has not written any."""
        try:
            known: dict[str, Any] = json.loads((self.dir / "status.json").read_text())
        except (OSError, ValueError):
            return {}
        return known if known.get("pid") == self.pid else {}

    def phase(self) -> str:
        """The phase that the driver is in; empty: not known yet, or over."""
        known = self.status()
        return str(known.get("phase", "")) if known.get("state") == "running" else ""

    def hold(self, phase: str, chance: random.Random, *, within_s: float, given_up: Callable[[], bool]) -> bool:
        """Stop the driver within the phase.  False: it has ended, or `given_up` says that the phase will not come."""
        until_s = time.monotonic() + within_s
        while self.is_running and not given_up():
            assert time.monotonic() < until_s, f"{phase!r} did not come in {within_s:.0f} s:\n{self.said()[-3000:]}"
            if self.phase() == phase:
                time.sleep(chance.uniform(0.0, _DELAY_S))
                self.signal(signal.SIGSTOP)
                if self.is_held() and self.phase() == phase:
                    return True
                self.signal(signal.SIGCONT)
            time.sleep(_LOOK_S)
        return False

    def is_held(self) -> bool:
        """Wait until the driver is stopped; False: it has ended."""
        for _ in range(1000):
            with contextlib.suppress(psutil.NoSuchProcess):  # ended and reaped: False in the end
                state = psutil.Process(self.pid).status()
                if state in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
                    return state == psutil.STATUS_STOPPED
            time.sleep(0.001)
        return False

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    # ------------------------------------------------------------------------------------------ what it leaves

    def rows(self) -> list[dict[str, Any]]:
        """Of metrics.jsonl, without a line that is being written."""
        path = self.dir / "metrics.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.is_file() else []
        return [json.loads(line) for line in lines]

    def digests(self) -> dict[int, dict[str, str]]:
        """SHA-256 of the workers' files in each whole checkpoint, by step."""
        found = {}
        for folder in (self.dir / "checkpoints").glob("step_*"):
            with contextlib.suppress(OSError, ValueError):  # pruned meanwhile
                files = json.loads((folder / "COMPLETE").read_text())["files"]
                own = {name: entry["sha256"] for name, entry in files.items() if name.startswith("trainer")}
                found[int(folder.name.removeprefix("step_"))] = own
        return found


def called(process: psutil.Process) -> str:
    """Name and command line of a process; empty: it is gone."""
    try:
        return " ".join([process.name(), *process.cmdline()])
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return ""


def left(processes: Sequence[psutil.Process], *, within_s: float) -> list[psutil.Process]:
    _, alive = psutil.wait_procs(processes, timeout=within_s)
    return [p for p in alive if called(p)]
