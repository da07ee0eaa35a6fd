"""TLT_LOG_FORMAT=json: what a log collector reads, one object a line."""

import json
import logging
import os
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from flows import _logging
from flows.status import _last_trouble

ENVIRONMENT = os.environ | {"TLT_LOG_FORMAT": "json"}


def records(text: str) -> list[dict[str, Any]]:
    """Every line is an object."""
    found = [json.loads(line) for line in text.splitlines()]
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in found)
    return found


def run(*command: str) -> list[dict[str, Any]]:
    done = subprocess.run([sys.executable, *command], env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode
    return records(done.stderr)


def test_a_run_s_log_names_run_step_task_and_exception(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLT_LOG_FORMAT", "json")

    def run() -> None:
        with _logging.run_log(tmp_path / "demo"):
            log = logging.getLogger("tlt_core.run.session")
            log.info("two\nlines of %s", "one record")
            logging.getLogger("some.library").info("chatter")
            _logging.at_step(3)
            log.warning("slow", extra={"task_run_name": "update-3"})
            _logging.at_step(None)
            raise RuntimeError("a worker died")

    with pytest.raises(RuntimeError):
        run()
    first, second, third = records((tmp_path / "demo" / "log.jsonl").read_text())
    assert abs(datetime.fromisoformat(first.pop("time")).timestamp() - datetime.now().timestamp()) < 60
    message = "two\nlines of one record"
    assert first == {"level": "INFO", "logger": "tlt_core.run.session", "message": message, "run": "demo"}
    assert (second["level"], second["step"], second["task"]) == ("WARNING", 3, "update-3")
    assert third["exception"].splitlines()[-1] == "RuntimeError: a worker died"
    assert "step" not in third
    assert json.loads(_last_trouble(tmp_path / "demo" / "log.jsonl"))["level"] == "ERROR"


def test_whatever_ends_a_command_is_a_record() -> None:
    env = os.environ | {"TLT_LOG_FORMAT": "xml"}
    command = [sys.executable, "-m", "flows.cli", "train", "conf/smoke.yaml"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "tlt train: TLT_LOG_FORMAT='xml': choose text or json\n")
    (error,) = run("-m", "flows.cli", "train", "conf/nowhere.yaml")
    assert (error["level"], error["logger"]) == ("ERROR", "flows.cli")
    assert error["message"].startswith("tlt train: Configuration file conf/nowhere.yaml does not exist")
    code = "import threading, warnings; from flows import _logging; _logging.attach_terminal(); warnings.warn('old')\n"
    code += "thread = threading.Thread(target=lambda: 1 / 0); thread.start(); thread.join(); {}['key']"
    old, thread, bug = run("-c", code)
    assert (old["level"], old["logger"]) == ("WARNING", "py.warnings")
    assert thread["exception"].endswith("ZeroDivisionError: division by zero")
    assert bug["exception"].endswith("KeyError: 'key'")


@pytest.mark.slow
@pytest.mark.prefect
def test_a_whole_run_writes_nothing_else_and_no_secret(tmp_path: Path, embedded_model: Path) -> None:
    (tmp_path / "home" / "models").mkdir(parents=True)
    (tmp_path / "home" / "models" / embedded_model.name).symlink_to(embedded_model)
    settings = [f"output_dir={tmp_path}/runs", f"tracking.uri=sqlite:///{tmp_path}/mlflow.db", "cluster.num_workers=1"]
    unset = {k: v for k, v in ENVIRONMENT.items() if not k.startswith("PREFECT")}
    secrets = dict.fromkeys(("MLFLOW_TRACKING_PASSWORD", "HF_TOKEN", "JUDGE_API_KEY", "TLT_NOTIFY_URL"), "geheim-4711")
    env = unset | {"TLT_HOME": str(tmp_path / "home"), "PREFECT_HOME": str(tmp_path / "prefect")} | secrets
    command = [sys.executable, "-m", "flows.cli", "train", "conf/smoke.yaml", *settings]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(records(done.stderr)) > 5
    run = tmp_path / "runs" / "smoke"
    logged = records((run / "log.jsonl").read_text())
    assert {(line["run"], line.get("step")) for line in logged} == {("smoke", None), ("smoke", 1), ("smoke", 2)}

    assert "geheim-4711" not in done.stdout + done.stderr
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"mlflow.db", "config.yaml", "run.json", "log.jsonl", "prefect.db"} <= {path.name for path in written}
    assert not [path for path in written if b"geheim-4711" in path.read_bytes()]
