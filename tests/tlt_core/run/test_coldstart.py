"""The folder of a cold start is named by everything that it depends on."""

import subprocess
import sys
from pathlib import Path

import pytest

from conf.load import load
from tlt_core.data import solutions
from tlt_core.machine.precision import settle
from tlt_core.run import coldstart


@pytest.fixture
def config(tmp_path):
    """The smoke run with settings, in a folder where no run of that name has ever been."""
    return lambda *settings: settle(load("conf/smoke.yaml", [f"output_dir={tmp_path}", *settings]))


@pytest.mark.parametrize("change", ["seed=1", "coldstart.num_examples=7", "data.num_train=3", "update.dtype=bfloat16"])
def test_another_setting_is_another_folder(config, change):
    assert coldstart.output_dir(config(change)) != coldstart.output_dir(config())


def test_what_rollouts_compute_in_is_not_part_of_it(config):
    both = [config(f"rollout.dtype={dtype}", "update.dtype=float32") for dtype in ("bfloat16", "float32")]
    assert coldstart.output_dir(both[0]) == coldstart.output_dir(both[1])


def test_other_worked_solutions_are_another_folder(config, monkeypatch):
    """What an earlier release had trained on its own wording is not taken for this one's."""
    cfg = config("num_steps=9")
    before = coldstart.output_dir(cfg)
    assert before == coldstart.output_dir(config())  # RL is not part of it
    monkeypatch.setattr(solutions, "version", lambda: "another")
    assert coldstart.output_dir(cfg) != before


RUN = """
import json, sys
from pathlib import Path
from conf.load import load
from tlt_core.run import coldstart

folder, cfg = Path(sys.argv[1]), load("conf/smoke.yaml")

def make(cfg, *, out_dir, **_):
    print("making", flush=True)
    sys.stdin.readline()
    out_dir.mkdir(parents=True)
    (out_dir / "coldstart.json").write_text(json.dumps({"metrics": {"made_by": int(sys.argv[2])}}))

coldstart._make = make
found = coldstart.run(cfg, model_dir=folder, data_dir=folder, out_dir=folder / "coldstart" / "x", on_progress=print)
print("has that of", found["made_by"], flush=True)
"""


def test_of_two_runs_that_want_it_one_trains(tmp_path):
    """Two processes: the second waits until the first has written the folder, and reads it."""

    def start(number):
        command = [sys.executable, "-c", RUN, str(tmp_path), str(number)]
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def does(process):
        return next(line for line in process.stdout if line.startswith(("making", "process", "has that")))

    first = start(1)
    try:
        assert does(first) == "making\n"
        second = start(2)
        try:
            assert does(second) == f"process {first.pid} is at work in {tmp_path}; waiting for it\n"
            assert first.communicate("go\n", timeout=60)[0] == "has that of 1\n"
            assert second.communicate("go\n", timeout=60)[0] == "has that of 1\n"
        finally:
            second.kill()
    finally:
        first.kill()


def test_it_is_sharded_as_the_update_is(config):
    """A model whose optimizer does not fit on one GPU has to start, too."""
    sharded = config("update.backend={kind: deepspeed, zero_stage: 3}")
    spec = coldstart._spec(sharded, Path("model"), num_steps=2)
    assert spec.trainer is not None
    assert spec.trainer.update.backend == sharded.update.backend
    assert coldstart.output_dir(sharded) != coldstart.output_dir(config()), "sums of gradients are rounded differently"
