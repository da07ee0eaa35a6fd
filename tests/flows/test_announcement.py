"""What a run says before it begins, and what it took."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conf.load import load
from flows import _announcement
from flows._announcement import ToDo, Took, kernels_in_words, plan_in_words, to_do
from tlt_core.run import inputs


def test_the_plan_names_what_is_to_do_and_what_is_there() -> None:
    cfg = load("conf/demo.yaml")
    assert plan_in_words(cfg, ToDo(True, True, True, True, 0)) == (
        "to do: model, data, cold start, first drafter, 8 steps, export"
    )
    assert plan_in_words(cfg, ToDo(False, False, False, True, 0)) == (
        "to do: first drafter, 8 steps, export (already there: model, data, cold start)"
    )
    assert "to do: steps 6 to 8, export" in plan_in_words(cfg, ToDo(False, False, False, False, 5))
    plain = load("conf/demo.yaml", ["coldstart.enabled=false", "rollout.speculation.policy=off"])
    assert plan_in_words(plain, ToDo(True, True, False, False, 0)) == "to do: model, data, 8 steps, export"


def test_what_exists_is_not_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLT_HOME", str(tmp_path))
    cfg = load("conf/demo.yaml", [f"output_dir={tmp_path}/runs"])
    cfg = cfg.with_dtypes(rollout="float32", update="float32", coldstart="float32")
    assert to_do(cfg) == ToDo(True, True, True, True, 0)
    inputs.data_dir(cfg).mkdir(parents=True)
    (inputs.data_dir(cfg) / "manifest.json").write_text("{}")
    (cfg.run_dir / "drafter-eagle3").mkdir(parents=True)
    assert to_do(cfg) == ToDo(True, False, True, False, 0)


@pytest.mark.parametrize(
    ("isa", "said"),
    [
        ("amx", "rollout in bfloat16 on C kernels with matrix tiles (AMX), update in float32 on torch's; 2 x 1 thread"),
        ("neon", "rollout in bfloat16 on C kernels (neon), update in float32 on torch's; 2 x 1 thread"),
        (None, "rollout in bfloat16 on torch's kernels, update in float32 on torch's; 2 x 1 thread"),
    ],
)
def test_the_kernels_are_named(isa: str | None, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_announcement.precision, "kernels_isa", lambda: isa)
    cfg = load("conf/demo.yaml", ["rollout.dtype=bfloat16", "update.dtype=float32"])
    assert kernels_in_words(cfg) == said


def test_it_is_said_before_prefect_is_imported_and_once(tmp_path: Path) -> None:
    code = (
        "import json, logging, sys; logging.basicConfig(level=logging.INFO, format='%(message)s')\n"
        "from conf.load import load\nfrom flows._announcement import announce\n"
        f"cfg = load('conf/smoke.yaml', ['output_dir={tmp_path}/runs'])\n"
        "announce(cfg); announce(cfg)\n"
        "print(json.dumps(['prefect' in sys.modules, 'mlflow' in sys.modules]))"
    )
    env = os.environ | {"TLT_HOME": str(tmp_path / "artifacts")}  # without the cold start of another run
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    prefect, mlflow = json.loads(done.stdout)
    assert not prefect
    assert not mlflow
    lines = done.stderr.splitlines()
    assert len([line for line in lines if "to do:" in line]) == 1


def test_what_each_stage_took(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr(_announcement.time, "monotonic", lambda: now_s[0])
    _announcement._began_s.cache_clear()
    took = Took()
    now_s[0] = 110.0
    took.lap("cold start")
    now_s[0] = 140.0
    took.step({"timing_s/gen": 12.0, "timing_s/update_actor": 15.0})
    assert took.stages == {
        "cold start": 10.0,
        "rollouts": 12.0,
        "updates": 15.0,
        "validations": 0.0,
        "rest of the steps": 3.0,
    }
    assert took.in_words() == (
        "took 0:40: cold start 0:10, rollouts 0:12, updates 0:15, validations 0:00, rest of the steps 0:03"
    )
    assert (took.metrics()["took/cold_start_s"], took.metrics()["took/total_s"]) == (10.0, 40.0)


def test_the_log_says_nothing_at_a_second_time(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "flows._announcement")
    _announcement._say("one line of this test")
    _announcement._say("one line of this test")
    assert caplog.messages.count("one line of this test") == 1
