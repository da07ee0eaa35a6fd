"""The run's own files, and the boundary around MLflow."""

import json
import socket
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import mlflow
import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE

from conf.load import load
from conf.run import RunConfig
from conf.system import TrackingConfig
from tasks import mlflow_run
from tasks.mlflow_run import MlflowRun
from tasks.track import Tracker
from tests.tasks.scored_batches import scored_batch
from tlt_core.data.dataset import DataManifest
from tlt_core.data.question import DataError
from tlt_core.items.speculation import OFF, RoundReport
from tlt_core.items.store import Ref
from tlt_core.items.types import WorkerSpan, WorkerState
from tlt_core.machine import provenance
from tlt_core.rollout.engine import RoundTrace
from tlt_core.run.step_metrics import StepMetrics

DATA: dict[str, Any] = {"data": {"kind": "reasoning_gym"}, "digest": "0123456789abcdef" * 4}


@pytest.fixture(scope="module")
def store_uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One database for all tests of this file: creating it takes seconds."""
    return f"sqlite:///{tmp_path_factory.mktemp('tracking')}/mlflow.db"


@pytest.fixture
def tracking(store_uri: str, tmp_path: Path) -> Iterator[TrackingConfig]:
    """An experiment of its own for each test."""
    yield TrackingConfig(uri=store_uri, experiment=tmp_path.name, system_metrics=False)
    mlflow.set_tracking_uri(store_uri)
    mlflow.end_run()


def _open(cfg: TrackingConfig, resume_id: str = "") -> MlflowRun:
    return MlflowRun(cfg, run_name="r", resume_id=resume_id, on_start=lambda run_id: None)


def test_an_earlier_attempts_run_goes_on_and_a_deleted_one_is_replaced(
    tracking: TrackingConfig, caplog: pytest.LogCaptureFixture
) -> None:
    first = _open(tracking)
    first.describe({"num_steps": 2}, tags={}, **DATA)
    first.metrics({"loss": 1.0}, step=1)
    first.end("FAILED")
    second = _open(tracking, first.run_id)
    second.describe({"num_steps": 5}, tags={}, **DATA)
    second.metrics({"loss": 0.5}, step=2)
    second.end("FINISHED")
    assert second.run_id == first.run_id
    client = MlflowClient(tracking.uri)
    assert [m.step for m in client.get_metric_history(first.run_id, "loss")] == [1, 2]
    assert client.get_run(first.run_id).data.params["num_steps"] == "2"
    client.delete_experiment(first.experiment_id)  # MLflow finds it by its name, and takes no run into it
    third = _open(tracking, "f" * 32)
    assert third.run_id not in ("", "f" * 32)
    assert third.experiment_id == first.experiment_id
    assert "a new one begins" in caplog.text
    assert f"MLflow's experiment '{tracking.experiment}' was deleted and is restored" in caplog.text


def test_an_experiment_keeps_what_a_user_has_said_of_it(tracking: TrackingConfig) -> None:
    client = MlflowClient(tracking.uri)
    made = client.create_experiment(tracking.experiment, tags={"mlflow.note.content": "mine"})
    run = _open(tracking)
    run.end("FINISHED")
    assert run.experiment_id == made
    assert client.get_experiment(made).tags["mlflow.note.content"] == "mine"


def test_a_run_in_the_environment_is_left_alone(tracking: TrackingConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a job that `mlflow run` has started, or in a shell where somebody looks at a run."""
    client = MlflowClient(tracking.uri)
    theirs = client.create_run(client.create_experiment(f"{tracking.experiment} theirs")).info
    for name, value in {"RUN_ID": theirs.run_id, "EXPERIMENT_ID": theirs.experiment_id}.items():
        monkeypatch.setenv(f"MLFLOW_{name}", value)
    run = _open(tracking)
    run.end("FINISHED")
    assert run.run_id not in ("", theirs.run_id)
    assert client.get_experiment(run.experiment_id).name == tracking.experiment
    assert client.get_run(theirs.run_id).info.status == "RUNNING"


def test_a_store_that_does_not_answer_never_raises(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    broken = _open(TrackingConfig(uri=f"sqlite:///{tmp_path}/file/mlflow.db", system_metrics=False))
    broken.metrics({"loss": 1.0}, step=1)
    broken.end("FINISHED")
    assert broken.run_id == ""
    assert caplog.text.count("training goes on") == 1
    assert "lacks the last 3 calls" in caplog.text  # start, step, end


def test_what_a_server_missed_is_sent_when_it_answers_again(
    tracking: TrackingConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = _open(tracking)
    with monkeypatch.context() as network:
        network.setattr(MlflowClient, "log_batch", Mock(side_effect=MlflowException("connection refused")))
        run.metrics({"loss": 1.0}, step=1)
        run.metrics({"loss": 2.0}, step=2)
        run.settle(within_s=30.0)
    assert "lacks the last 2 calls" in caplog.text
    run.metrics({"loss": 3.0}, step=3)
    run.end("FINISHED")
    history = MlflowClient(tracking.uri).get_metric_history(run.run_id, "loss")
    assert [(m.step, m.value) for m in history] == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert "answers again" in caplog.text


def test_what_a_server_refuses_does_not_hold_up_the_rest(
    tracking: TrackingConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = _open(tracking)
    log_batch = MlflowClient.log_batch

    def refuse_first(self: MlflowClient, run_id: str, *, metrics: Any) -> None:
        if metrics[0].step == 1:
            raise MlflowException("not like this", error_code=INVALID_PARAMETER_VALUE)
        log_batch(self, run_id, metrics=metrics)

    monkeypatch.setattr(MlflowClient, "log_batch", refuse_first)
    run.metrics({"loss": 1.0}, step=1)
    run.metrics({"loss": 2.0}, step=2)
    run.artifact(tmp_path / "no-such-file")
    run.end("FINISHED")
    client = MlflowClient(tracking.uri)
    assert [m.step for m in client.get_metric_history(run.run_id, "loss")] == [2]
    assert client.get_run(run.run_id).info.status == "FINISHED"


class _Session:
    """What the tracker reads of a session, after one step."""

    def __init__(self, cfg: RunConfig, *, completed_steps: int = 0) -> None:
        self.cfg = cfg
        self.completed_steps = completed_steps
        self.resume_attempt = 0
        self.resumed_metrics: dict[str, float] = {}
        report = RoundReport(OFF, 1, 9, (0,), (0,), (0,), 0.001, 0.02)
        self.rollout = SimpleNamespace(rounds=[[RoundTrace(report, (0,), 1, 1001.0, 0.5)], []])
        self.scoring = SimpleNamespace(sample_texts=lambda *_: [{"prompt": "2 + 3 = ?", "reward": 1.0}])
        self.tracker_run_id = ""
        self.metrics = StepMetrics()
        self.metrics.log({"critic/rewards/mean": 0.5, "timing_s/gen": 3.0})
        self.metrics.spans.append(WorkerSpan(0, WorkerState.BUSY, 1000.0, 1003.0))


@pytest.fixture
def cfg(tracking: TrackingConfig, tmp_path: Path) -> RunConfig:
    """A run in a folder of its own."""
    cfg = load("conf/smoke.yaml", [f"output_dir={tmp_path}"]).model_copy(update={"tracking": tracking})
    provenance.begin_attempt(cfg)
    (tmp_path / "data").mkdir()
    manifest = DataManifest(
        "d" * 64, cfg.data.model_dump(mode="json"), "by hand", "t" * 64, 64, 9, {"train": 3}, {"sums": 3}, 0, {}
    )
    (tmp_path / "data" / "manifest.json").write_text(json.dumps(asdict(manifest)))
    return cfg


def _tracker(session: Any, cfg: RunConfig) -> Tracker:
    return Tracker(session, dataset=Ref(str(Path(cfg.output_dir) / "data"), 3, "d" * 64))


def test_a_step_leaves_metrics_figures_and_samples(cfg: RunConfig, caplog: pytest.LogCaptureFixture) -> None:
    session: Any = _Session(cfg)
    with caplog.at_level("INFO"), _tracker(session, cfg) as tracker:
        tracker.begin_step()
        metrics = tracker.step(session, 1, scored_batch())
        verdict = tracker.verdict()
    (row,) = [json.loads(line) for line in (cfg.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert row == {"step": 1, **metrics}
    assert {"timing_s/tracking", "timing_s/step", "perf/overhead_share", "training/resume_attempt"} <= row.keys()
    figures = {p.name for p in (cfg.run_dir / "figures").iterdir()}
    assert figures == {"timeline_000001.png", "lengths_000001.png", "speculation_000001.png", "reward.png"}
    assert json.loads((cfg.run_dir / "samples" / "step_000001.jsonl").read_text())["reward"] == 1.0
    assert "step    1/2" in caplog.text
    client = MlflowClient(cfg.tracking.uri)
    run = client.get_run(session.tracker_run_id)
    stored = run.data
    assert (stored.metrics["critic/rewards/mean"], stored.params["rollout/num_samples"]) == (0.5, "4")
    assert max(map(len, stored.params.values())) <= 500
    assert (stored.tags["verdict"], "saved/total_s" in stored.metrics) == (verdict, True)
    assert ("d" * 64).startswith(run.inputs.dataset_inputs[0].dataset.digest)
    database = Path(cfg.tracking.uri.removeprefix("sqlite:///"))
    assert run.info.artifact_uri.startswith(database.with_name("mlartifacts").as_uri())
    uploaded = {a.path for a in client.list_artifacts(session.tracker_run_id)}
    assert uploaded == {"config.yaml", "run.json", "data", "figures", "samples"}
    assert provenance.tracker_run_id(cfg.run_dir) == session.tracker_run_id


def test_the_newest_step_is_a_file_for_prometheus(cfg: RunConfig) -> None:
    with _tracker(_Session(cfg), cfg) as tracker:
        tracker.record({"critic/rewards/mean": 0.5, "val-core/all/reward/mean_at_4": 0.25}, step=1)
        tracker.record({"critic/rewards/mean": 0.75, "actor/grad_norm": float("nan")}, step=2)
    assert (cfg.run_dir / "metrics.prom").read_text().splitlines() == [
        'tlt_step{run="smoke"} 2',
        'tlt_critic_rewards_mean{run="smoke"} 0.75',
        'tlt_actor_grad_norm{run="smoke"} nan',
    ]


def test_a_resumed_attempt_drops_the_rows_that_it_will_write_again(cfg: RunConfig) -> None:
    rows = [{"step": s, "critic/rewards/mean": 0.1 * s} for s in range(4)]
    path = cfg.run_dir / "metrics.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows) + '{"step": 4, "crit')
    with _tracker(_Session(cfg, completed_steps=2), cfg):
        pass
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1, 2]


def test_a_step_that_was_saved_but_not_recorded_is_recorded_on_resume(cfg: RunConfig) -> None:
    first: Any = _Session(cfg)
    with _tracker(first, cfg) as tracker:
        tracker.record({"training/global_step": 0}, step=0)
        tracker.record({"training/global_step": 1, "critic/rewards/mean": 0.1}, step=1)
        (cfg.run_dir / "metrics.jsonl").open("a").write('{"step": 2, "training/global_step": 2}\n')  # MLflow lacks it
    second: Any = _Session(cfg, completed_steps=3)
    second.resumed_metrics = {"training/global_step": 3, "critic/rewards/mean": 0.3}
    with _tracker(second, cfg):
        pass
    assert second.tracker_run_id == first.tracker_run_id
    rows = [json.loads(line) for line in (cfg.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    client = MlflowClient(cfg.tracking.uri)
    history = client.get_metric_history(first.tracker_run_id, "training/global_step")
    assert sorted(m.step for m in history) == [0, 1, 2, 3]
    rewards = client.get_metric_history(first.tracker_run_id, "critic/rewards/mean")
    assert [(m.step, m.value) for m in rewards] == [(1, 0.1), (3, 0.3)]


def test_an_attempt_that_fails_is_marked_so_before_it_begins_as_well(cfg: RunConfig) -> None:
    sessions: list[Any] = [_Session(cfg), _Session(cfg)]
    with pytest.raises(RuntimeError), _tracker(sessions[0], cfg):
        raise RuntimeError("a worker died")
    (Path(cfg.output_dir) / "data" / "manifest.json").write_text("{")
    with pytest.raises(DataError):
        _tracker(sessions[1], cfg)
    client = MlflowClient(cfg.tracking.uri)
    assert [client.get_run(session.tracker_run_id).info.status for session in sessions] == ["FAILED", "FAILED"]


def test_a_server_that_accepts_and_never_answers_delays_only_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each call to it takes until its time limit."""
    monkeypatch.setattr(mlflow_run, "_START_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        uri = f"http://127.0.0.1:{server.getsockname()[1]}"
        run = _open(TrackingConfig(uri=uri, system_metrics=False))
        for step in range(50):
            run.metrics({"loss": 1.0}, step=step)
        run.end("KILLED")  # the thread makes no further call
    assert (run.run_id, run.link) == ("", "")
    assert "lacks the last 52 calls" in caplog.text  # start, steps, end


def test_a_defect_of_ours_is_not_taken_for_a_failure_of_the_server(tracking: TrackingConfig) -> None:
    run = _open(tracking)
    run.describe({}, tags={}, data={}, digest="")  # the defect: data without a kind
    with pytest.raises(KeyError):
        run.settle(within_s=30.0)
