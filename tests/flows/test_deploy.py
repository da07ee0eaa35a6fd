"""Deployments: what prefect.yaml says, background processes, and (slow) a real server and worker that are killed."""

import json
import os
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from mlflow import MlflowClient

from flows import deploy as deploying
from flows._automations import LIMITS
from flows.deploy import Daemon
from tests.flows.deployed import FILE, Deployed, deploy, settings, wait_for, webhook

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(99)"


def deployments() -> dict[str, dict[str, Any]]:
    return {d["name"]: d for d in yaml.safe_load(FILE.read_text())["deployments"]}


@pytest.mark.parametrize("name", deployments())
def test_a_deployment_has_limits_typed_parameters_and_accepts_its_own(name: str) -> None:
    from prefect.flows import load_flow_from_entrypoint

    deployment = deployments()[name]
    assert deployment["concurrency_limit"] == {"limit": 1, "collision_strategy": "ENQUEUE"}
    assert "tlt" in deployment["tags"]
    assert len(LIMITS.keys() & set(deployment["tags"])) == 1
    flow = load_flow_from_entrypoint(deployment["entrypoint"])
    schema = flow.parameters.model_dump()
    options = schema["properties"]["config"]["anyOf"]
    assert {"$ref": "#/definitions/RunConfig"} in options, "no form in Prefect's pages"
    assert {"rollout", "drafter", "retrain"} <= schema["definitions"]["RunConfig"]["properties"].keys()
    flow.validate_parameters(deployment["parameters"])
    assert flow.retries == 0


def test_a_stubborn_process_is_stopped_in_time_and_a_stranger_with_its_pid_is_not_ours(tmp_path: Path) -> None:
    daemon = Daemon("stubborn", folder=tmp_path)
    process = daemon.start(["-c", STUBBORN], env=os.environ)
    while "up" not in daemon.last_lines():
        time.sleep(0.05)
    assert daemon.process() == process
    (tmp_path / "stranger.pid").write_text(f"{process.pid} {process.create_time() - 5}\n")
    assert Daemon("stranger", folder=tmp_path).stop(patience_s=0.1) == []
    assert process.is_running()
    daemon.stop(patience_s=0.5)
    assert not process.is_running()
    assert daemon.process() is None
    deploying.end([process], patience_s=0.1)  # gone already: no error


def test_runs_of_other_machines_are_not_taken_for_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://host:4200/api")
    with pytest.raises(deploying.DeployError, match="no Prefect server answers"):
        deploying.recover_here(port=4200, alone=True)
    monkeypatch.setattr(deploying, "answers", lambda url: True)
    with pytest.raises(deploying.DeployError, match="another machine's server"):
        deploying.recover_here(port=4200)


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory, embedded_model: Path) -> Iterator[Deployed]:
    with deploy(tmp_path_factory.mktemp("deploy"), embedded_model, {"retrain": {"schedules": []}}) as deployed:
        yield deployed


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.prefect
def test_prefect_takes_the_pool_and_the_deployments_for_kubernetes(deployed: Deployed) -> None:
    """tests/deploy/test_image.py fills the job's template."""
    pool = ["--type", "kubernetes", "--base-job-template", "deploy/kubernetes/pool.json"]
    deployed.prefect("work-pool", "create", "tlt-kubernetes", *pool)
    deployed.prefect("deploy", "--all", "--prefect-file", "deploy/kubernetes/prefect.yaml")
    assert "train/train-kubernetes" in deployed.prefect("deployment", "ls")


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.prefect
def test_without_a_worker_the_deployments_are_made_and_nothing_is_started(deployed: Deployed) -> None:
    env = deployed.env | {"PREFECT_API_URL": deployed.url, "PREFECT_HOME": str(deployed.root / "elsewhere")}
    elsewhere = deployed._replace(env=env)
    deployed.prefect("deployment", "delete", "evaluate/evaluate")
    assert "deployed" in elsewhere.tlt("deploy", "--no-worker", "--file", str(deployed.root / "prefect.yaml"))
    assert not list((deployed.root / "elsewhere").glob("*.pid"))
    assert "evaluate/evaluate" in deployed.prefect("deployment", "ls")


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.prefect
def test_a_failed_run_is_reported_to_the_webhook(deployed: Deployed) -> None:
    with webhook() as (url, received):
        deployed._replace(env=deployed.env | {"TLT_NOTIFY_URL": url}).up()
        deployed.prefect("deployment", "run", "evaluate/evaluate", "-p", "config=conf/nowhere.yaml")
        wait_for(lambda: len(received) > 0, "a message")
    assert "TLT: evaluate/nowhere is Failed" in received[0]["text"]
    assert "conf/nowhere.yaml does not exist" in received[0]["text"]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.prefect
@pytest.mark.parametrize("lost", ["worker and flow", "flow", "machine", "container"])
def test_a_run_whose_processes_are_killed_ends_completed_with_every_step_once(deployed: Deployed, lost: str) -> None:
    name = f"killed-{lost.replace(' ', '-')}"
    run_dir = deployed.root / "runs" / name
    steps = 8
    overrides = json.dumps(settings(deployed.root, name, f"num_steps={steps}"))
    deployed.prefect("deployment", "run", "train/train", "-p", "config=conf/smoke.yaml", "-p", f"overrides={overrides}")
    wait_for((run_dir / "checkpoints" / "step_000002").exists, "two steps")

    worker = deployed.daemon("worker")
    (flow,) = (p for p in worker.children() if "prefect.engine" in " ".join(p.cmdline()))
    flow.suspend()  # no further step while the worker is killed
    if lost != "flow":
        worker.send_signal(signal.SIGKILL)
        psutil.wait_procs([worker], timeout=30)
    flow.send_signal(signal.SIGKILL)
    before = len((run_dir / "metrics.jsonl").read_text().splitlines())
    assert before <= steps, "the run was over before it was killed"
    if lost == "worker and flow":
        deployed.up()
    elif lost == "machine":
        deployed.worker_alone()
    elif lost == "container":
        there = {"PREFECT_API_URL": deployed.url.replace("127.0.0.1", "127.1")}  # as if it were elsewhere
        deployed._replace(env=deployed.env | there).tlt("recover", "--alone")
        deployed.worker_alone()

    def run() -> Any:
        (found,) = (r for r in deployed.flow_runs("train") if overrides == json.dumps(r.parameters["overrides"]))
        return found

    wait_for(lambda: run().state_name in ("Completed", "Failed"), "the end of the run")
    assert run().state_name == "Completed"
    assert run().run_count == 2
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(steps + 1))
    assert rows[-1]["training/resume_attempt"] == 1.0
    run_id = json.loads((run_dir / "run.json").read_text())["tracker_run_id"]
    history = MlflowClient(f"sqlite:///{deployed.root}/mlflow.db").get_metric_history(run_id, "training/global_step")
    assert sorted(point.step for point in history) == list(range(steps + 1))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.prefect
def test_a_run_that_takes_too_long_is_cancelled(deployed: Deployed) -> None:
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_URL, temporary_settings

    from flows import _automations

    with temporary_settings({PREFECT_API_URL: deployed.url}), get_client(sync_client=True) as client:
        _automations.install(client, notify_url="", limits={"limit-48h": timedelta(seconds=10)})
    overrides = json.dumps(settings(deployed.root, "endless", "num_steps=5000", "coldstart.enabled=false"))
    deployed.prefect("deployment", "run", "train/train", "-p", "config=conf/smoke.yaml", "-p", f"overrides={overrides}")

    def state() -> str:
        (found,) = (r for r in deployed.flow_runs("train") if overrides == json.dumps(r.parameters["overrides"]))
        return str(found.state_name)

    wait_for(lambda: state() in ("Cancelled", "Completed", "Failed"), "the end of the run")
    assert state() == "Cancelled"
    wait_for(lambda: not deployed.daemon("worker").children(), "the end of its process")
    status = json.loads((deployed.root / "runs" / "endless" / "status.json").read_text())
    assert status["state"] == "stopped", "it ended in order"
