"""The whole pipeline on the smoke configuration, through a real Prefect engine, a real worker group and MLflow."""

import itertools
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName
from transformers import AutoModelForCausalLM

from conf.load import load
from conf.run import RunConfig
from flows import _heartbeat, _logging
from flows.stages import evaluate
from flows.train import train
from tlt_core.items.metrics import SECTIONS, declaration, undeclared

pytestmark = pytest.mark.prefect


QUIET_S = 2.0
LATE_S = 9.0  # a busy machine lets the heartbeat's thread wait; 15 s are promised


class _Shown(logging.Handler):
    """What people are shown, and when."""

    def __init__(self) -> None:
        super().__init__()
        self.addFilter(_logging.shown_on_terminal)
        self.lines: list[tuple[float, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.created, record.getMessage()))


def _config(folder: Path, **changes: Any) -> RunConfig:
    settings = [f"output_dir={folder}/runs", f"tracking.uri=sqlite:///{folder}/mlflow.db", "name=pipeline"]
    return load("conf/smoke.yaml", [*settings, "evaluation.plain_every_steps=2"]).model_copy(update=changes)


@pytest.fixture(scope="module")
def folder(runs_home: Path) -> Iterator[Path]:
    """Folder in which two steps were trained and then, as a resumed run, a third."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setattr(logging.getLogger("tasks"), "level", logging.INFO)
        environment.setattr(_heartbeat, "QUIET_S", QUIET_S)
        shown = _Shown()
        logging.getLogger().addHandler(shown)
        train(_config(runs_home))
        logging.getLogger().removeHandler(shown)
        (runs_home / "shown.json").write_text(json.dumps(shown.lines))
        train(_config(runs_home, num_steps=3))
        yield runs_home


@pytest.fixture(scope="module")
def rows(folder: Path) -> list[dict[str, float]]:
    """Metrics by step."""
    return [json.loads(line) for line in (folder / "runs/pipeline/metrics.jsonl").read_text().splitlines()]


def test_every_step_is_recorded_once_with_the_field_s_vocabulary(rows: list[dict[str, float]]) -> None:
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert [row.get("training/resume_attempt") for row in rows] == [None, 0.0, 0.0, 1.0]
    assert ["val-core/all/reward/greedy" in row for row in rows] == [True, False, True, True]
    assert {"coldstart/loss_first", "val-core/all/reward/mean_at_2"} <= rows[0].keys()
    phases = ("gen", "reward", "update_actor", "update_weights", "save_checkpoint", "tracking")
    assert sum(rows[1][f"timing_s/{p}"] for p in phases) <= rows[1]["timing_s/step"]


def test_plain_decoding_gives_the_same_responses(rows: list[dict[str, float]]) -> None:
    assert [row.get("rollout/plain_equal_frac") for row in rows] == [None, None, 1.0, 1.0], "every second and the last"


def test_every_metric_is_declared_and_every_declared_one_is_made(rows: list[dict[str, float]]) -> None:
    assert not undeclared(name for row in rows for name in row if name != "step")
    declared = {metric.name: metric for section in SECTIONS for metric in section.metrics}
    made = [{found.name for name in row if (found := declaration(name))} for row in rows]
    always = {name for name, metric in declared.items() if not metric.when}
    assert all(always <= names for names in made[1:])
    parts = {
        name
        for name, metric in declared.items()
        if metric.when in ("speculation", "validation", "cold start", "a comparison")
    }
    assert parts <= set().union(*made)


def test_both_attempts_are_one_mlflow_run(folder: Path, rows: list[dict[str, float]]) -> None:
    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("tlt").experiment_id])
    assert run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "critic/rewards/mean")
    assert [(m.step, m.value) for m in history] == [(row["step"], row["critic/rewards/mean"]) for row in rows[1:]]
    figures = {a.path for a in client.list_artifacts(run.info.run_id, "figures")}
    assert {"figures/timeline_000003.png", "figures/lengths_000003.png", "figures/reward.png"} <= figures
    assert len(client.list_artifacts(run.info.run_id, "samples")) == 3
    assert run.inputs.dataset_inputs[0].dataset.digest
    assert {"took/total_s", "took/cold_start_s", "saved/total_s"} <= run.data.metrics.keys()
    assert "in 3 steps" in run.data.tags["verdict"]


def test_the_run_s_folder_has_policy_samples_and_how_it_was_made(folder: Path) -> None:
    run = folder / "runs/pipeline"
    assert AutoModelForCausalLM.from_pretrained(run / "policy").config.num_hidden_layers == 2
    assert load(run / "config.yaml").num_steps == 3
    first, _ = json.loads((run / "run.json").read_text())["attempts"]
    stages = {"start", "cold start", "workers", "rollouts", "updates", "validations", "rest of the steps", "end"}
    assert stages <= first["took_s"].keys()
    log = (run / "log.txt").read_text()
    assert "tasks.track:  step    1/2" in log
    assert "prefect.task_runs: rollout-3 Finished" in log
    lines = (run / "samples/step_000002.jsonl").read_text().splitlines()
    assert len(lines) == 4
    assert {"prompt", "response", "answer", "reward", "num_tokens", "finish"} <= json.loads(lines[0]).keys()


def test_runs_and_tasks_have_names_that_a_person_recognises(folder: Path) -> None:
    with get_client(sync_client=True) as client:
        runs = client.read_flow_runs(flow_run_filter=FlowRunFilter(name=FlowRunFilterName(any_=["pipeline"])))
        tasks = {t.name for r in runs for t in client.read_task_runs() if t.flow_run_id == r.id}
        artifacts = {a.key for a in client.read_artifacts()}
    assert {r.state_name for r in runs} == {"Completed"}
    per_step = ("rollout", "reward", "policy-update", "publish", "checkpoint", "track")
    assert {f"{t}-{s}" for t in per_step for s in (1, 2, 3)} | {"evaluate-0", "evaluate-2", "cold-start"} <= tasks
    assert {"pipeline-progress", "pipeline-steps", "pipeline-mlflow"} <= artifacts


def test_nobody_waits_in_the_dark(folder: Path) -> None:
    lines: list[tuple[float, str]] = json.loads((folder / "shown.json").read_text())
    times = [at_s for at_s, _ in lines]
    assert max(after - before for before, after in itertools.pairwise(times)) < QUIET_S + LATE_S
    texts = [text for _, text in lines]
    assert any("to do:" in text for text in texts)
    assert any(text.startswith("took ") and "rollouts " in text for text in texts)
    assert any(text.startswith("verdict: ") and "in 2 steps" in text for text in texts)
    assert any(text.endswith(("s so far", "left")) for text in texts), "workers need more than two seconds to start"


def test_evaluate_repeats_the_last_validation(folder: Path, rows: list[dict[str, float]]) -> None:
    metrics = evaluate(_config(folder, num_steps=3))
    names = [name for name in rows[-1] if name.startswith("val-core/")]
    assert names
    assert {name: metrics[name] for name in names} == {name: rows[-1][name] for name in names}
    assert json.loads((folder / "runs/pipeline/evaluation.json").read_text())["step"] == 3
