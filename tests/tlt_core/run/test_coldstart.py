"""The folder of a cold start is named by everything that it depends on."""

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


def test_what_changes_the_model_changes_the_folder_and_nothing_else_does(config, monkeypatch):
    def folder(*settings):
        return coldstart.output_dir(config(*settings))

    sharded = "update.backend={kind: deepspeed, zero_stage: 3}"
    for change in ("seed=1", "coldstart.num_examples=7", "data.num_train=3", "update.dtype=bfloat16", sharded):
        assert folder(change) != folder(), change
    assert folder("num_steps=9") == folder()
    half, full = (folder(f"rollout.dtype={dtype}", "update.dtype=float32") for dtype in ("bfloat16", "float32"))
    assert half == full
    before = folder()
    monkeypatch.setattr(solutions, "version", lambda: "another")  # of the worked solutions
    assert folder() != before


def test_it_is_sharded_as_the_update_is(config):
    """A model whose optimizer does not fit on one GPU has to start, too."""
    sharded = config("update.backend={kind: deepspeed, zero_stage: 3}")
    spec = coldstart._spec(sharded, sharded.cluster, Path("model"), num_steps=2)
    assert spec.trainer is not None
    assert spec.trainer.update.backend == sharded.update.backend
