"""`tlt train conf/smoke.yaml` in processes of their own, which a test may kill.

Speculation is off and groups are dealt up front, as its choices and who is free first follow the clock (they change no
token, but the last bits of log-probabilities).
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

TIMEOUT_S = 900
_SETTINGS = (
    "rollout.dispatch=static",
    "rollout.speculation.policy=off",
    "rollout.max_new_tokens=48",
    "update.optimizer.learning_rate=1e-3",
    'reward.functions=[{kind: python, path: "tests.flows.length_reward:length_reward"}]',
)


class Run:
    """One run in `root`, perhaps with a data set and a cold start of its own, in `home`."""

    def __init__(self, root: Path, name: str, *settings: str, steps: int, home: Path | None = None) -> None:
        self.folder, self.log, self._steps = root / "runs" / name, root / f"{name}.log", steps
        own = (f"name={name}", f"output_dir={root / 'runs'}", f"tracking.uri=sqlite:///{root}/mlflow.db")
        settings = (*own, f"num_steps={steps}", *_SETTINGS, *settings)
        self._settings = ["conf/smoke.yaml", *settings]
        self._environment = os.environ | {"OMP_NUM_THREADS": "1", "PREFECT_HOME": str(root / "prefect")}
        self._environment |= {"TLT_HOME": str(home)} if home else {}

    def start(self, command: str = "train") -> subprocess.Popen:
        log = self.log.open("a")
        whole = [sys.executable, "-m", "flows.cli", command, *self._settings]
        return subprocess.Popen(whole, env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def finish(self) -> "Run":
        process = self.start()
        try:
            assert process.wait(TIMEOUT_S) == 0, self.said[-3000:]
        finally:
            process.kill()
        assert [row["step"] for row in self.rows] == list(range(self._steps + 1)), "a step is missing or logged twice"
        return self

    def start_and_kill(
        self,
        ready: Callable[[], bool],
        *,
        victim: Callable[[int], int] = lambda driver: driver,
        number: int = signal.SIGKILL,
    ) -> subprocess.Popen:
        """Start, and send the signal to the victim when `ready`; the driver may live on."""
        process = self.start()
        deadline = time.monotonic() + TIMEOUT_S
        while not ready():
            assert process.poll() is None, f"the run ended before it was killed: {self.said[-3000:]}"
            assert time.monotonic() < deadline, "the moment to kill never came"
            time.sleep(0.002)
        os.kill(victim(process.pid), number)
        return process

    def has_checkpoint(self, step: int) -> bool:
        return (self.folder / "checkpoints" / f"step_{step:06d}").exists()

    def has_scored(self, step: int) -> bool:
        return (self.folder / "steps" / f"{step:06d}" / "scored.safetensors").exists()

    @property
    def said(self) -> str:
        return self.log.read_text()

    @property
    def rows(self) -> list[dict[str, float]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    @property
    def digest(self) -> str:
        """Of the policy's weights."""
        return hashlib.sha256((self.folder / "policy" / "model.safetensors").read_bytes()).hexdigest()
