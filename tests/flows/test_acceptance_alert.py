"""From a drop of acceptance to a new champion, and back: a real Prefect server, worker, MLflow store and webhook."""

import json
import shutil
from pathlib import Path
from typing import Any

import psutil
import pytest
from mlflow import MlflowClient

from conf.load import load
from conf.run import RunConfig
from tests.flows.deployed import deploy, settings, wait_for, webhook
from tlt_core.run import inputs

MODEL = "tlt-served-drafter"


def put_policy(cfg: RunConfig, *, seed: int) -> None:
    """The policy that `tlt train` has left there."""
    shutil.rmtree(cfg.run_dir / "policy", ignore_errors=True)
    shutil.copytree(inputs.start_model(cfg.model, seed=seed), cfg.run_dir / "policy")


def outcomes(file: Path) -> list[str]:
    return [json.loads(line)["outcome"] for line in file.read_text().splitlines()] if file.is_file() else []


@pytest.mark.slow
@pytest.mark.prefect
def test_a_drop_is_reported_and_retrained_and_the_new_champion_is_rolled_back(
    tmp_path: Path, embedded_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TLT_HOME", str(tmp_path / "home"))
    more = ("coldstart.enabled=false", "rollout.temperature=0.02", "retrain.min_speed=0", "retrain.repeats=1")
    overrides = settings(tmp_path, "served", *more)
    cfg = load("conf/smoke.yaml", overrides)
    checks, decisions = cfg.run_dir / "acceptance.jsonl", cfg.run_dir / "retrain.jsonl"
    client = MlflowClient(cfg.tracking.uri)

    def champion() -> Any:
        return client.get_model_version_by_alias(MODEL, "champion")

    with webhook() as (url, received):
        monkeypatch.setenv("TLT_NOTIFY_URL", url)
        no_clock: dict[str, Any] = {"schedules": []}
        with deploy(tmp_path, embedded_model, {"retrain": no_clock, "check-drafter": no_clock}) as deployed:
            sockets = deployed.daemon("server").net_connections()
            assert {c.laddr.ip for c in sockets if c.status == psutil.CONN_LISTEN} == {"127.0.0.1"}
            put_policy(cfg, seed=0)
            monkeypatch.setenv("PREFECT_API_URL", deployed.url)  # no private servers
            there = deployed._replace(env=deployed.env | {"PREFECT_API_URL": deployed.url})
            there.tlt("retrain", "conf/smoke.yaml", *overrides)
            assert outcomes(decisions) == ["promoted"]
            check = ["deployment", "run", "check-drafter/check-drafter", "-p", "config=conf/smoke.yaml"]
            check += ["-p", f"overrides={json.dumps(overrides)}"]
            deployed.prefect(*check)
            wait_for(lambda: outcomes(checks) == ["ok"], "a check of the new champion")

            put_policy(cfg, seed=1)  # the policy has been trained on: its drafter has not
            deployed.prefect(*check)
            wait_for(lambda: len(outcomes(decisions)) > 1, "a retraining")
            wait_for(lambda: bool(received), "a message")
            assert outcomes(checks) == ["ok", "dropped"]
            assert outcomes(decisions) == ["promoted", "promoted"]
            assert received == [{"text": received[0]["text"]}], "one message, and none for the check that was well"
            assert f"TLT: the acceptance of {MODEL} has dropped" in received[0]["text"]
            assert f"of {MODEL} version 1" in received[0]["text"]
            (started,) = (run for run in deployed.flow_runs("retrain") if run.deployment_id)
            assert started.parameters == {"config": "conf/smoke.yaml", "overrides": overrides}
            assert started.created_by.type == "AUTOMATION"
            assert champion().version == 2
            said = there.tlt("rollback", "conf/smoke.yaml", *overrides)
            assert f"champion: {MODEL} version 1; it was version 2" in said
            assert champion().version == 1
            assert outcomes(decisions)[-1] == "rolled back"
