"""One run after the other is hit by the cases; whatever they leave is compared with a run in peace.

A run goes on through many cases, and is started again when a case has ended it.  When it has finished, the next one
begins (a lap).  The reference has the digests of all steps, so every checkpoint of every lap has its counterpart.
"""

import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests.faults.cases import COLD, END, SEED, START, STEP, Case, Damage
from tests.faults.faults import Place
from tests.faults.harness import NOISE, NUM_STEPS, Run, called, left, settings
from tests.faults.service import Mlflow
from tlt_core.run.inputs import artifacts_dir

LIMIT_S = 400  # for a phase to come, and for a run to end
HOME = artifacts_dir().resolve()
_REWARD = "critic/rewards/mean"
LEFT_S = 100.0  # until none of a run's processes is there


class Storm:
    """Owns the reference, the laps, the MLflow server and the disk."""

    def __init__(self, root: Path) -> None:
        self.root, self.chance = root, random.Random(SEED)
        self.disk = root / "disk"
        self.disk.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400m", "faults", str(self.disk)])  # not everybody may
        self.mlflow = Mlflow(root)
        self._laps = 0
        self._finished = False
        self.unproven: list[dict[str, Any]] = []
        # the reference first: it keeps all checkpoints, so it is on the large disk
        self.run = Run(
            root / "runs",
            "reference",
            home=HOME,
            prefect=root / "prefect",
            uri=f"sqlite:///{root}/reference.db",
            more=settings(reference=True),
        )

    def begin(self) -> None:
        self.mlflow.start()
        reference = self.run
        assert reference.start().wait(LIMIT_S * 3) == 0, reference.said()[-3000:]
        self._rewards = {row["step"]: row.get(_REWARD) for row in reference.rows()}
        self._digests = reference.digests()
        self._policy = _digest(reference)
        assert len(set(self._rewards.values())) > NUM_STEPS / 2, "a run in which nothing changes proves nothing"
        self.mlflow.wait_ready()
        self.run = self._new_lap(fresh=False)

    def close(self) -> None:
        self.run.kill()
        self.mlflow.kill()
        if self.disk.is_mount():
            subprocess.run(["umount", "--lazy", str(self.disk)], check=True)

    # ------------------------------------------------------------------------------------------ a case

    def hit(self, case: Case, record: dict[str, Any]) -> None:
        """Have a fault strike in its phase.  Raises AssertionError where not that comes of it which has to.

        record: gets what came of it, and later `resumed`.
        """
        if isinstance(case.kind, Damage):
            self._spoil(case.kind, record)
            return
        if case.kind.rounds:
            self.settle()
        self.reach(case.phase)
        run, step, family = self.run, len(self.run.rows()), self.run.family()
        place = Place(run, self.mlflow, self.disk)
        try:
            with case.kind.strike(place):
                self._go_on()
                found = self._ended(case, family) if case.kind.code is not None else self._lasted(case)
        finally:
            self._go_on()
        if case.kind.code is None:
            self._goes_on(case, step)
        record |= {**found, "step": step, "lap": run.name}
        if case.kind.rounds:
            self._leave(record, step)
            return
        self.check()
        if found["code"] == 0:
            self.finish()
        elif case.kind.code is not None:
            record["resumed"] = False
            self.unproven.append(record)

    def _leave(self, record: dict[str, Any], step: int) -> None:
        """The same command goes on; nothing can be said about bits, so a new lap follows."""
        if record["code"]:
            self.run.start()
            self._until(lambda: len(self.run.rows()) > step + 1 or not self.run.is_running, "two steps")
            record["resumed"] = True
        assert self.run.is_running or self.run.has_finished, self.run.said()[-3000:]
        self.run.kill()
        self.run, self._finished = self._new_lap(fresh=False), False

    def _spoil(self, damage: Damage, record: dict[str, Any]) -> None:
        """Damage a file while no run is at work; then start it."""
        while self._finished or len(self.run.rows()) < 3 or self.run.is_running:
            if len(self.run.rows()) < 3 or self._finished:
                self.reach("rollout")
                self._go_on()
                self._until(lambda: len(self.run.rows()) >= 3 or not self.run.is_running, "three steps")
            self.run.kill()
        path = damage.path(self.run)
        content, step = path.read_bytes(), len(self.run.rows())
        damage.spoil(path)
        began_s = time.monotonic()
        process = self.run.start()
        record |= {"step": step, "lap": self.run.name, "resumed": False}
        if damage.code is not None:
            assert process.wait(LIMIT_S) == damage.code, self.run.said()[-3000:]
            record |= {"code": damage.code, "message": self._message(damage.says)}
            damage.mend(path, content)
        else:
            self._until(lambda: len(self.run.rows()) > step or not self.run.is_running, "a new step")
            assert self.run.is_running or process.returncode == 0, self.run.said()[-3000:]
            assert damage.says in self.run.said(), self.run.said()[-3000:]
            record |= {"code": None, "message": _line(self.run.said(), damage.says)}
        record["seconds"] = round(time.monotonic() - began_s, 1)
        self.unproven.append(record)
        self.check()

    def reach(self, phase: str) -> None:
        for _ in range(5):
            if phase in COLD and self._has_passed(phase):
                self.settle()
                self.run.kill()
                self.run, self._finished = self._new_lap(fresh=True), False
            if not self.run.is_running:
                self._begin(phase)
            if self.run.hold(phase, self.chance, within_s=LIMIT_S, given_up=lambda: self._has_passed(phase)):
                return
            if self.run.is_running:
                self.run.kill()
            else:
                self.finish()
        raise AssertionError(f"the phase {phase!r} did not come in five starts")

    def settle(self) -> None:
        """Let the run go on until all that ended it has been shown to be without effect."""
        if self.unproven and not self.run.is_running:
            self.run.start()
        self._until(lambda: not self._are_some_unproven() or not self.run.is_running, "the next checkpoint")
        if self.unproven:
            self.finish()

    # ------------------------------------------------------------------------------------------ what comes of it

    def _ended(self, case: Case, family: list[psutil.Process]) -> dict[str, Any]:
        began_s = time.monotonic()
        assert self.run.process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):  # said below, with the run's output
            self.run.process.wait(LIMIT_S / 4)
        seconds = round(time.monotonic() - began_s, 1)
        code, said = self.run.process.poll(), self.run.said()
        assert code is not None, f"it has not ended after {seconds} s:\n{said[-3000:]}"
        assert code == case.kind.code or (case.kind.may_miss and code == 0), f"exit code {code}:\n{said[-3000:]}"
        found = {"code": code, "seconds": seconds, "message": self._message(case.kind.says) if code else ""}
        alive = [called(p)[:80] for p in left(family, within_s=LEFT_S)]
        assert not alive, f"processes are left: {alive}"
        return {**found, "gone_s": round(time.monotonic() - began_s - seconds, 1)}

    def _message(self, says: str) -> str:
        """The command's last paragraph, which is the only one.  Empty: it could not say anything."""
        said = self.run.said()
        assert not [word for word in NOISE if word in said], said[-4000:]
        if not says:
            return ""
        assert said.count("\ntlt train: ") == 1, said[-3000:]
        message = said.rpartition("\ntlt train: ")[2].strip()
        assert says.lower() in message.lower(), said[-3000:]
        return _short(message)

    def _lasted(self, case: Case) -> dict[str, Any]:
        until_s = time.monotonic() + case.kind.lasts_s
        while time.monotonic() < until_s and self.run.is_running:
            time.sleep(0.05)
        return {"code": None, "seconds": case.kind.lasts_s, "message": ""}

    def _goes_on(self, case: Case, step: int) -> None:
        run = self.run

        def has_got_on() -> bool:
            if not run.is_running:
                return True
            if case.phase in STEP:
                return len(run.rows()) > step
            return run.phase() not in ("", case.phase)

        self._until(has_got_on, "the run does not go on")
        assert run.is_running or run.has_finished, run.said()[-3000:]
        if case.kind.says:
            self._until(lambda: case.kind.says in run.said(), case.kind.says)

    def check(self) -> None:
        """Each step was recorded once, in order, with the reference's reward; each checkpoint has its bits."""
        rows = self.run.rows()
        steps = [row["step"] for row in rows]
        assert steps == list(range(len(steps))), f"a step is missing, or there twice: {steps}"
        for row in rows:
            assert row.get(_REWARD) == self._rewards[row["step"]], f"another reward in step {row['step']}"
        saved = self.run.digests()
        for step, files in saved.items():
            assert files == self._digests[step], f"other weights after step {step}"
        for record in [r for r in self.unproven if max(saved, default=0) > r["step"]]:
            record["resumed"] = True
            self.unproven.remove(record)

    def _are_some_unproven(self) -> bool:
        self.check()
        return bool(self.unproven)

    def finish(self) -> None:
        process = self.run.process
        assert process is not None
        assert process.wait(LIMIT_S) == 0, self.run.said()[-3000:]
        self.check()
        assert len(self.run.rows()) == NUM_STEPS + 1
        assert _digest(self.run) == self._policy, "another policy than in peace"
        if "MLflow lacks" not in self.run.said():  # it was down at the end; the next attempt would send the rest
            tracked = self.mlflow.steps(json.loads((self.run.dir / "run.json").read_text())["tracker_run_id"])
            assert sorted(tracked) == list(range(NUM_STEPS + 1)), f"MLflow has other steps: {tracked}"
        for record in self.unproven:
            record["resumed"] = True
        self.unproven.clear()
        self._finished = True

    # ------------------------------------------------------------------------------------------ laps

    def _begin(self, phase: str) -> None:
        if self._finished and phase not in END:
            self.run, self._finished = self._new_lap(fresh=phase in COLD), False
        self.run.start()

    def _new_lap(self, *, fresh: bool) -> Run:
        self._laps += 1
        shutil.rmtree(self.run.dir, ignore_errors=True)  # the disk is small
        name, home = f"lap{self._laps}", self.root / f"home-{self._laps}" if fresh else HOME
        if fresh:
            home.mkdir()
            for made in ("models", "data"):
                (home / made).symlink_to(HOME / made)
        prefect = self.root / "prefect"
        return Run(self.disk, name, home=home, prefect=prefect, uri=self.mlflow.uri, more=settings())

    def _has_passed(self, phase: str) -> bool:
        if phase in COLD:
            return any((self.run.home / "coldstart").glob("*/coldstart.json"))
        return phase in START and self.run.status().get("step") is not None

    def _go_on(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # it may end between the question and the signal
            if self.run.process is not None and self.run.process.returncode is None:
                os.kill(self.run.pid, signal.SIGCONT)

    def _until(self, come: Callable[[], object], what: str) -> None:
        until_s = time.monotonic() + LIMIT_S
        while not come():
            assert time.monotonic() < until_s, f"not in {LIMIT_S} s: {what}\n{self.run.said()[-3000:]}"
            time.sleep(0.05)


def _digest(run: Run) -> str:
    return hashlib.sha256((run.dir / "policy" / "model.safetensors").read_bytes()).hexdigest()


def _line(said: str, says: str) -> str:
    """The log line that has these words, without its time."""
    return _short(next((line[9:] for line in said.splitlines() if says and says in line), ""))


def _short(text: str) -> str:
    return " ".join(text.split())
