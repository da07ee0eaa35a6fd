"""A worker that was stopped, or that does not get on, is named, and the run does not wait for it for ever."""

import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch

from conf.rollout import RolloutConfig, SpeculationConfig
from conf.system import ClusterConfig
from tlt_core.cluster import watch as watching
from tlt_core.cluster.group import WorkerDied, WorkerGroup
from tlt_core.cluster.heartbeat import Signs
from tlt_core.cluster.messages import WorkerSpec
from tlt_core.cluster.placement import Node, Placement
from tlt_core.cluster.watch import Watch
from tlt_core.items.types import GenerationRequest, NoiseKey, SamplingParams
from tlt_core.machine.getting_on import STACKS_WANTED

HERE = Node("a", "127.0.0.1")


class _Dispatcher:
    """Its part that knows the workers' signs."""

    def __init__(self) -> None:
        self.known = Signs()
        self.stacks_wanted = 0

    def ask(self, method: str) -> Any:
        if method == "want_stacks":
            self.stacks_wanted += 1
            return None
        return self.known.signs()


@pytest.fixture
def dispatcher(monkeypatch: pytest.MonkeyPatch) -> _Dispatcher:
    monkeypatch.setattr(watching, "_EVERY_S", 0.001)
    return _Dispatcher()


def _watch(dispatcher: _Dispatcher, tmp_path: Path, **limits: float) -> Watch:
    placement = Placement(None, (0, 1), (HERE, HERE), HERE)  # type: ignore[arg-type]  # Ray's group is not asked
    cluster = ClusterConfig.model_validate({"num_workers": 2, **limits})
    watch = Watch(cluster, placement, dispatcher.ask, shared=tmp_path)
    watch.begin("update")
    return watch


def _look_for(watch: Watch, seconds: float, *, beats: Any = lambda: None, **how: bool) -> str | None:
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        beats()
        problem = watch.look([0, 1], **how)
        if problem is not None:
            return problem
        time.sleep(0.005)
    return None


def test_a_silent_worker_is_named_with_phase_and_given_up(
    dispatcher: _Dispatcher, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watch = _watch(dispatcher, tmp_path, silence_s=0.4)
    done = iter(range(10**6))
    dispatcher.known.beat(1, os.getpid(), 0)
    problem = _look_for(watch, 5.0, beats=lambda: dispatcher.known.beat(0, 1, next(done)))
    assert problem is not None
    assert f"'update' from worker 1 on node 127.0.0.1, process {os.getpid()} (" in problem
    assert "worker 0" not in problem
    said = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(said) == 1
    assert "worker 1" in said[0]
    assert "cluster.silence_s" in said[0]


def test_a_worker_that_is_heard_again_is_not_given_up(
    dispatcher: _Dispatcher, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "_SILENCE_SAID_S", 0.1)
    watch = _watch(dispatcher, tmp_path, silence_s=60.0)
    done = iter(range(10**6))

    def both() -> None:
        dispatcher.known.beat(0, 1, next(done))
        dispatcher.known.beat(1, 2, next(done))

    both()
    assert _look_for(watch, 0.3) is None
    assert "has given no sign of life" in caplog.text
    monkeypatch.setattr(watching, "_EVERY_S", 0.05)
    assert _look_for(watch, 0.3, beats=both) is None
    assert "worker 1 answers again" in caplog.text


def test_workers_that_live_and_do_not_get_on_are_given_up_and_their_stacks_asked_for(
    dispatcher: _Dispatcher, tmp_path: Path
) -> None:
    watch, done = _watch(dispatcher, tmp_path, stuck_s=0.4), iter(range(10**6))

    def beat() -> None:
        for rank in (0, 1):
            dispatcher.known.beat(rank, rank, 7)

    def one_gets_on() -> None:
        dispatcher.known.beat(0, 0, 7)
        dispatcher.known.beat(1, 1, next(done))

    assert _look_for(watch, 0.8, beats=beat, may_idle=True) is None
    watch.begin("update")
    assert _look_for(watch, 0.8, beats=one_gets_on) is None, "one worker that gets on is enough"
    problem = _look_for(watch, 5.0, beats=beat)
    assert problem is not None
    assert "cluster.stuck_s=0" in problem
    assert "'update'" in problem
    assert str(tmp_path / "stacks") in problem
    assert dispatcher.stacks_wanted == 1


def _requests() -> list[list[GenerationRequest]]:
    tokens = torch.arange(3, 9).int()
    return [[GenerationRequest(NoiseKey(0, 1, g, 0), tokens)] for g in range(8)]


@pytest.fixture
def group(tiny_folder: Path, tmp_path: Path) -> Any:
    rollout = RolloutConfig(dtype="float32", max_live_requests=1, speculation=SpeculationConfig(policy="off"))
    spec = WorkerSpec(tiny_folder, rollout, max_len=300, trainer=None, threads=1, device="cpu")
    with WorkerGroup(ClusterConfig(num_workers=2, silence_s=8.0, stuck_s=8.0), spec, shared=tmp_path) as started:
        started.load(None, 0)
        yield started
        started.kill()


@pytest.mark.slow
def test_a_stopped_process_ends_the_rollout_and_is_gone_afterwards(
    group: WorkerGroup, caplog: pytest.LogCaptureFixture
) -> None:
    pid = ray.get(group._workers[1].__ray_call__.remote(lambda _: os.getpid()))
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(WorkerDied, match=rf"worker 1 on node .*, process {pid} \(stopped\)"):
        group.run_phase(
            _requests(), SamplingParams(max_new_tokens=200), dispatch="static", on_progress=lambda drained: None
        )
    assert "has given no sign of life" in caplog.text
    deadline = time.monotonic() + 30
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the stopped process is still there"
        time.sleep(0.1)


@pytest.mark.slow
def test_a_killed_worker_ends_the_rollout_at_once(group: WorkerGroup, caplog: pytest.LogCaptureFixture) -> None:
    victims = [ray.get(group._workers[1].__ray_call__.remote(lambda _: os.getpid()))]
    with pytest.raises(WorkerDied, match="resume"):
        group.run_phase(
            _requests(),
            SamplingParams(max_new_tokens=250),
            dispatch="static",
            on_progress=lambda drained: os.kill(victims.pop(), signal.SIGKILL) if victims and drained.live[1] else None,
        )
    assert "worker 1 on node" in caplog.text, "said before Ray ends"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gcs_server", "raylet"])
def test_a_ray_without_its_servers_is_given_up_at_once_and_leaves_no_process(group: WorkerGroup, name: str) -> None:
    names = {process: process.name() for process in psutil.Process().children(recursive=True)}
    of_ray = [process for process, called in names.items() if called.startswith(("ray::", "gcs_server", "raylet"))]
    began_s = time.monotonic()
    next(process for process in of_ray if names[process] == name).kill()
    with pytest.raises(WorkerDied, match=rf"Ray's process {name} on this machine has ended.*same command"):
        group._wait_for([w.__ray_call__.remote(lambda _: time.sleep(600)) for w in group._workers], "sleeping")
    assert time.monotonic() - began_s < 40, "Ray itself takes a minute"
    _, alive = psutil.wait_procs(of_ray, timeout=20)
    assert not alive


@pytest.mark.slow
def test_a_call_that_never_ends_is_given_up_and_its_stack_written(group: WorkerGroup, tmp_path: Path) -> None:
    def wait_in_vain(_: object) -> None:
        time.sleep(10_000)

    with pytest.raises(WorkerDied, match=r"No worker has got on for cluster\.stuck_s=8 s in the phase 'sleeping'"):
        group._wait_for([w.__ray_call__.remote(wait_in_vain) for w in group._workers], "sleeping")
    for rank in range(2):
        assert "wait_in_vain" in (tmp_path / "stacks" / f"worker-{rank}.txt").read_text()


def test_stacks_that_somebody_asks_for_are_written_the_drivers_too(dispatcher: _Dispatcher, tmp_path: Path) -> None:
    watch = _watch(dispatcher, tmp_path)
    (tmp_path / "stacks").mkdir()
    (tmp_path / STACKS_WANTED).touch()
    for _ in range(3):
        time.sleep(0.002)
        watch.look([0, 1])
    assert dispatcher.stacks_wanted == 1
    assert "test_stacks_that_somebody_asks_for" in (tmp_path / "stacks" / "driver.txt").read_text()
