"""kill -9 at any moment: the same command goes on, and ends with the very weights of a run that was never killed."""

import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.flows.runs import Run

pytestmark = [pytest.mark.slow, pytest.mark.prefect]

STEPS = 4
ACTORS = ("ray::Worker", "ray::Dispatcher")
NOISE = ("Traceback", "SIGABRT", "Stack trace", "core_worker", "terminate called", "Exception ignored")


def run(root: Path, name: str, *settings: str, workers: int = 2) -> Run:
    return Run(root, name, f"cluster.num_workers={workers}", "checkpoint.keep_last=9", *settings, steps=STEPS)


def worker_of(driver: int) -> int:
    """A Ray actor of this run (Ray's processes descend from the driver)."""
    children = psutil.Process(driver).children(recursive=True)
    return next(c.pid for c in children if "ray::Worker" in f"{c.name()} {' '.join(c.cmdline())}")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("resume")


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.long), 2])
def test_killed_runs_end_where_the_uninterrupted_run_ends(root, workers):
    """fp32 on CPU, static dispatch: bitwise."""
    whole = run(root, f"whole{workers}", workers=workers).finish()
    killed = run(root, f"killed{workers}", workers=workers)
    moments = {
        "rollout of step 2": lambda: killed.has_checkpoint(1),
        "update of step 2": lambda: killed.has_scored(2),
        "checkpoint of step 3": (killed.folder / "checkpoints" / ".partial-step_000003").exists,
    }
    for moment, ready in moments.items():
        assert killed.start_and_kill(ready).wait(60) == -signal.SIGKILL, moment
    killed.finish()
    assert killed.digest == whole.digest
    rewards = [[row["critic/rewards/mean"] for row in x.rows[1:]] for x in (killed, whole)]
    assert rewards[0] == rewards[1]
    assert len(set(rewards[0])) > 1, "a run in which nothing changes proves nothing"
    assert killed.rows[-1]["training/resume_attempt"] >= 2


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
    whole = run(root, "streamed", *more).finish()
    assert sum(row.get("idle/streamed_share", 0) > 0 for row in whole.rows) >= 2
    assert run(root, "unstreamed", *more, "update.streamed=off").finish().digest == whole.digest
    killed = run(root, "killed-streaming", *more)
    for step, delay_s in enumerate((0.1, 0.5), start=1):  # into the rollout of the step after it
        process = killed.start_and_kill(
            lambda n=step: killed.has_checkpoint(n), victim=lambda driver, s=delay_s: time.sleep(s) or driver
        )
        assert process.wait(60) == -signal.SIGKILL
    assert killed.finish().digest == whole.digest


def test_a_killed_worker_fails_the_step_and_takes_nothing_of_the_drafters_training_along(root):
    """Killed while idle workers train: the resumed run goes on with optimizer, hidden states and the last publish."""
    trainer = run(
        root,
        "trainer",
        "rollout.speculation.policy=cost_model",
        "evaluation.every_steps=0",
        "drafter.warmup=true",
        "drafter.idle_training.rows_per_step=32",
        'reward.functions=[{kind: python, path: "tests.flows.length_reward:very_slow_length_reward"}]',
    )
    # Step 3 has its rollouts, and its rewards take over a second, in which both workers train.
    process = trainer.start_and_kill(lambda: trainer.has_scored(3), victim=worker_of)
    assert process.wait(120) == 1, trainer.said[-3000:]
    assert "worker process ended unexpectedly" in trainer.said
    assert "same command" in trainer.said
    assert trainer.rows[2]["drafter/optimizer_steps_total"] > 0
    after = trainer.finish().rows
    for step in (3, 4):
        own, before = after[step], after[step - 1]
        total = before["drafter/optimizer_steps_total"] + own["drafter/optimizer_steps"]
        assert own["drafter/optimizer_steps_total"] == total, "training began anew"
        assert own["drafter/buffer_tokens"] > before["drafter/buffer_tokens"], "hidden states were lost"
        assert own["drafter/version"] >= before["drafter/version"], "an older drafter is in use"


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGKILL, -9), (signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.long)],
)
def test_a_signal_ends_a_run_with_all_its_processes_and_it_goes_on(root, number, code):
    stopped, children = run(root, f"stopped{number}"), []

    def driver(pid: int) -> int:
        found = psutil.Process(pid).children(recursive=True)
        children.extend(c for c in found if number != signal.SIGKILL or c.name().startswith(ACTORS))
        return pid

    process = stopped.start_and_kill(lambda: stopped.has_checkpoint(1), victim=driver, number=number)
    assert process.wait(90) == code, stopped.said[-3000:]
    _, alive = psutil.wait_procs(children, timeout=60)
    assert children
    assert not alive, [p.cmdline()[:3] for p in alive]
    if number != signal.SIGKILL:
        assert "The same command goes on from the newest checkpoint" in stopped.said
        assert not [word for word in NOISE if word in stopped.said], stopped.said[-3000:]
        assert stopped.finish().rows[-1]["training/resume_attempt"] == 1


def test_a_run_that_has_the_time_saves_its_step_before_it_ends(root):
    """No checkpoint is due before the last step."""
    more = ["checkpoint.every_steps=100", "checkpoint.must_save_by_s=120"]
    graceful = run(root, "graceful", *more)
    process = graceful.start_and_kill((graceful.folder / "steps" / "000002").exists, number=signal.SIGTERM)
    assert process.wait(90) == 143, graceful.said[-3000:]
    assert "SIGTERM: the run ends when this step is saved" in graceful.said
    (saved,) = (path.name for path in (graceful.folder / "checkpoints").iterdir())
    assert saved in ("step_000002", "step_000003")  # the signal may come at the step's very end
    assert graceful.finish().rows[-1]["training/resume_attempt"] == 1
    assert graceful.digest == run(root, "whole", *more).finish().digest
