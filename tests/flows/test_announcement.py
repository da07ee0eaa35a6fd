"""What a run says before it begins, and what it took."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conf.load import load
from flows import _announcement
from flows._announcement import Took, plan_in_words
from tlt_core.items import checkpoint
from tlt_core.items.checkpoint import DriverState
from tlt_core.run import inputs


def test_the_plan_names_what_is_to_do_and_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLT_HOME", str(tmp_path))
    cfg = load("conf/demo.yaml", [f"output_dir={tmp_path}/runs"])
    cfg = cfg.with_dtypes(rollout="float32", update="float32", coldstart="float32")
    assert plan_in_words(cfg) == "to do: model, data, cold start, first drafter, 8 steps, export"
    more = ["coldstart.enabled=false", "rollout.speculation.policy=off"]
    plain = load("conf/demo.yaml", [f"output_dir={tmp_path}/plain", *more])
    assert plan_in_words(plain) == "to do: model, data, 8 steps, export"
    inputs.data_dir(cfg).mkdir(parents=True)
    (inputs.data_dir(cfg) / "manifest.json").write_text("{}")
    (cfg.run_dir / "drafter-eagle3").mkdir(parents=True)
    checkpoint.save(cfg.run_dir / "checkpoints", DriverState(5, 8, 1, "r", 0, "f", None), lambda _: None)
    said = "to do: model, cold start, steps 6 to 8, export (already there: data, first drafter)"
    assert plan_in_words(cfg) == said


def test_it_is_said_before_prefect_is_imported_and_once(tmp_path: Path) -> None:
    code = (
        "import logging, sys; logging.basicConfig(level=logging.INFO, format='%(message)s')\n"
        "from conf.load import load\nfrom flows._announcement import announce\n"
        f"cfg = load('conf/smoke.yaml', ['output_dir={tmp_path}/runs'])\n"
        "announce(cfg); announce(cfg)\n"
        "print(*{'prefect', 'mlflow'} & set(sys.modules))"
    )
    env = os.environ | {"TLT_HOME": str(tmp_path / "artifacts")}  # without the cold start of another run
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert done.stdout.strip() == ""
    assert done.stderr.count("to do:") == 1


def test_what_each_stage_took(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr(_announcement.time, "monotonic", lambda: now_s[0])
    _announcement._began_s.cache_clear()
    took = Took()
    now_s[0] = 110.0
    took.lap("cold start")
    now_s[0] = 140.0
    took.step({"timing_s/gen": 12.0, "timing_s/update_actor": 15.0})
    assert took.in_words() == (
        "took 0:40: cold start 0:10, rollouts 0:12, updates 0:15, validations 0:00, rest of the steps 0:03"
    )
    assert (took.metrics()["took/cold_start_s"], took.metrics()["took/total_s"]) == (10.0, 40.0)
