"""kill -9 at any moment: the same command goes on, and ends with the very weights of a run that was never killed."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.prefect]

STEPS = 4
TIMEOUT_S = 900


def command(root: Path, name: str, *, workers: int, more: Sequence[str] = ()) -> list[str]:
    settings = [
        f"name={name}",
        f"output_dir={root / 'runs'}",
        f"tracking.uri=sqlite:///{root / 'mlflow.db'}",
        f"num_steps={STEPS}",
        f"cluster.num_workers={workers}",
        "rollout.dispatch=static",
        "rollout.speculation.policy=off",  # its choices follow the clock: same tokens, other last bits
        "rollout.max_new_tokens=48",
        "update.optimizer.learning_rate=1e-3",
        "checkpoint.keep_last=9",
        'reward.functions=[{kind: python, path: "tests.flows.length_reward:length_reward"}]',
    ]
    return [sys.executable, "-m", "flows.cli", "train", "conf/smoke.yaml", *settings, *more]


def start(root: Path, name: str, *, workers: int, more: Sequence[str] = ()) -> subprocess.Popen:
    env = os.environ | {"OMP_NUM_THREADS": "1", "PREFECT_HOME": str(root / "prefect")}
    log = (root / f"{name}.log").open("a")
    return subprocess.Popen(command(root, name, workers=workers, more=more), env=env, stdout=log, stderr=log)


def finish(root: Path, name: str, *, workers: int, more: Sequence[str] = ()) -> dict:
    process = start(root, name, workers=workers, more=more)
    assert process.wait(TIMEOUT_S) == 0, (root / f"{name}.log").read_text()[-3000:]
    policy = (root / "runs" / name / "policy" / "model.safetensors").read_bytes()
    rows = [json.loads(x) for x in (root / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    return {"sha256": hashlib.sha256(policy).hexdigest(), "rows": rows}


def kill_when(
    process: subprocess.Popen, ready: Callable[[], bool], *, victim: Callable[[], int], number: int = signal.SIGKILL
) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not ready():
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline, "the moment to kill never came"
        time.sleep(0.002)
    os.kill(victim(), number)


def worker_pid(process: subprocess.Popen) -> int:
    """A Ray actor of this run (Ray's processes descend from the driver)."""
    for child in psutil.Process(process.pid).children(recursive=True):
        if child.name().startswith("ray::Worker") or "ray::Worker" in " ".join(child.cmdline()):
            return child.pid
    raise AssertionError("no worker process found")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("resume")


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.long), 2])
def test_killed_runs_end_where_the_uninterrupted_run_ends(root, workers):
    """fp32 on CPU, static dispatch: bitwise."""
    whole = finish(root, f"whole{workers}", workers=workers)
    name = f"killed{workers}"
    run = root / "runs" / name
    moments = {
        "rollout of step 2": lambda: (run / "checkpoints" / "step_000001").exists(),
        "update of step 2": lambda: (run / "steps" / "000002" / "scored.safetensors").exists(),
        "checkpoint of step 3": lambda: (run / "checkpoints" / ".partial-step_000003").exists(),
    }
    for moment, ready in moments.items():
        process = start(root, name, workers=workers)
        kill_when(process, ready, victim=lambda p=process: p.pid)
        assert process.wait(60) == -signal.SIGKILL, moment
    killed = finish(root, name, workers=workers)
    assert killed["sha256"] == whole["sha256"]
    assert [r["step"] for r in killed["rows"]] == list(range(STEPS + 1)), "a step is missing or logged twice"
    rewards = [[r["critic/rewards/mean"] for r in x["rows"] if r["step"] > 0] for x in (killed, whole)]
    assert rewards[0] == rewards[1]
    assert len(set(rewards[0])) > 1, "a run in which nothing changes proves nothing"
    assert killed["rows"][-1]["training/resume_attempt"] >= 2


def test_a_run_killed_while_its_update_is_streamed_ends_where_the_uninterrupted_run_ends(root):
    """Three groups on two workers: one is idle while the other decodes its second group.  Killed in that time."""
    more = [
        "rollout.num_prompts=3",
        "rollout.num_samples=6",
        "rollout.max_live_requests=1",
        "rollout.max_new_tokens=160",
        "update.groups_per_pack=1",
        "update.streamed=first",
    ]
    whole = finish(root, "streamed", workers=2, more=more)
    assert sum(row.get("idle/streamed_share", 0) > 0 for row in whole["rows"]) >= 2
    unstreamed = finish(root, "unstreamed", workers=2, more=[*more, "update.streamed=off"])
    assert unstreamed["sha256"] == whole["sha256"]
    checkpoints = root / "runs" / "killed-streaming" / "checkpoints"
    for step, delay_s in enumerate((0.1, 0.5), start=1):  # into the rollout of the step after it
        process = start(root, "killed-streaming", workers=2, more=more)
        kill_when(
            process,
            (checkpoints / f"step_{step:06d}").exists,
            victim=lambda p=process, s=delay_s: time.sleep(s) or p.pid,
        )
        assert process.wait(60) == -signal.SIGKILL
    assert finish(root, "killed-streaming", workers=2, more=more)["sha256"] == whole["sha256"]


def test_a_killed_worker_fails_the_step_and_the_run_resumes(root):
    name = "worker"
    run = root / "runs" / name
    process = start(root, name, workers=2)
    kill_when(process, (run / "checkpoints" / "step_000001").exists, victim=lambda: worker_pid(process))
    assert process.wait(120) == 1
    log = (root / f"{name}.log").read_text()
    assert "worker process ended unexpectedly" in log
    assert "same command" in log
    assert finish(root, name, workers=2)["rows"][-1]["step"] == STEPS


def test_a_killed_worker_takes_nothing_of_the_drafters_training_along(root):
    """Killed while idle workers train: the resumed run goes on with optimizer, hidden states and the last publish."""
    name = "trainer"
    run, log = root / "runs" / name, root / f"{name}.log"
    settings = [
        f"name={name}",
        f"output_dir={root / 'runs'}",
        f"tracking.uri=sqlite:///{root / 'mlflow.db'}",
        f"num_steps={STEPS}",
        "cluster.num_workers=2",
        "evaluation.every_steps=0",
        "drafter.warmup=true",
        "drafter.idle_training.rows_per_step=32",
        "checkpoint.keep_last=9",
        'reward.functions=[{kind: python, path: "tests.flows.length_reward:very_slow_length_reward"}]',
    ]
    command = [sys.executable, "-m", "flows.cli", "train", "conf/smoke.yaml", *settings]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PREFECT_HOME": str(root / "prefect")}

    def started() -> subprocess.Popen:
        return subprocess.Popen(command, env=env, stdout=log.open("a"), stderr=subprocess.STDOUT)

    def rows() -> dict[int, dict]:
        lines = (run / "metrics.jsonl").read_text().splitlines()
        return {row["step"]: row for row in map(json.loads, lines)}

    process = started()
    # Step 3 has its rollouts, and its rewards take over a second, in which both workers train.
    kill_when(process, (run / "steps" / "000003" / "scored.safetensors").exists, victim=lambda: worker_pid(process))
    assert process.wait(120) == 1, log.read_text()[-3000:]
    before = rows()[2]
    process = started()
    assert process.wait(TIMEOUT_S) == 0, log.read_text()[-3000:]
    after = rows()
    assert before["drafter/optimizer_steps_total"] > 0
    for step in (3, 4):
        own = after[step]
        total = after[step - 1]["drafter/optimizer_steps_total"] + own["drafter/optimizer_steps"]
        assert own["drafter/optimizer_steps_total"] == total, "training began anew"
        assert own["drafter/buffer_tokens"] > after[step - 1]["drafter/buffer_tokens"], "hidden states were lost"
        assert own["drafter/version"] >= after[step - 1]["drafter/version"], "an older drafter is in use"


def test_no_worker_outlives_a_killed_run(root):
    process = start(root, "orphans", workers=2)
    run = root / "runs" / "orphans"
    children: list[psutil.Process] = []

    def ready() -> bool:
        if not (run / "checkpoints" / "step_000001").exists():
            return False
        found = psutil.Process(process.pid).children(recursive=True)
        children.extend(c for c in found if c.name().startswith(("ray::Worker", "ray::Dispatcher")))
        return True

    kill_when(process, ready, victim=lambda: process.pid)
    process.wait(60)
    assert children, "no worker was seen before the kill"
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive, [p.cmdline()[:3] for p in alive]


NOISE = ("Traceback", "SIGABRT", "Stack trace", "core_worker", "terminate called", "Exception ignored")


def stopped(root: Path, name: str, number: int, ready: Callable[[], bool], *, more: Sequence[str] = ()) -> tuple:
    """Send a signal when `ready`; returns exit code and the log.  The end takes a minute and a half at most."""
    process, children = start(root, name, workers=2, more=more), []

    def victim() -> int:
        children.extend(psutil.Process(process.pid).children(recursive=True))
        return process.pid

    kill_when(process, ready, victim=victim, number=number)
    code = process.wait(90)
    _gone, alive = psutil.wait_procs(children, timeout=20)
    assert children
    assert not alive, alive
    return code, (root / f"{name}.log").read_text()


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.long)]
)
def test_a_signal_ends_a_run_in_order_and_it_goes_on(root, number, code):
    name = f"stopped{number}"
    checkpoints = root / "runs" / name / "checkpoints"
    found, log = stopped(root, name, number, (checkpoints / "step_000001").exists)
    assert found == code, log[-3000:]
    assert "The same command goes on from the newest checkpoint" in log
    assert not [word for word in NOISE if word in log], log[-3000:]
    rows = finish(root, name, workers=2)["rows"]
    assert [r["step"] for r in rows] == list(range(STEPS + 1))
    assert rows[-1]["training/resume_attempt"] == 1


def test_a_run_that_has_the_time_saves_its_step_before_it_ends(root):
    """No checkpoint is due before the last step."""
    more = ["checkpoint.every_steps=100", "checkpoint.must_save_by_s=120"]
    run = root / "runs" / "graceful"
    code, log = stopped(root, "graceful", signal.SIGTERM, (run / "steps" / "000002").exists, more=more)
    assert code == 143, log[-3000:]
    assert "SIGTERM: the run ends when this step is saved" in log
    saved = [path.name for path in (run / "checkpoints").iterdir()]
    assert len(saved) == 1
    assert saved[0] in ("step_000002", "step_000003")  # the signal may come at the step's very end
    graceful = finish(root, "graceful", workers=2, more=more)
    assert graceful["rows"][-1]["training/resume_attempt"] == 1
    assert graceful["sha256"] == finish(root, "whole", workers=2, more=more)["sha256"]
