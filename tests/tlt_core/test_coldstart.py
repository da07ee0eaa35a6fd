"""The folder of a cold start is named by everything that it depends on."""

import pytest

from conf.load import load
from tlt_core import coldstart, solutions


@pytest.mark.parametrize("change", ["seed=1", "coldstart.num_examples=7", "data.num_train=3", "rollout.dtype=bfloat16"])
def test_another_setting_is_another_folder(change):
    assert coldstart.output_dir(load("conf/smoke.yaml", [change])) != coldstart.output_dir(load("conf/smoke.yaml", []))


def test_other_worked_solutions_are_another_folder(monkeypatch):
    """What an earlier release had trained on its own wording is not taken for this one's."""
    cfg = load("conf/smoke.yaml", ["num_steps=9"])
    before = coldstart.output_dir(cfg)
    assert before == coldstart.output_dir(load("conf/smoke.yaml", []))  # RL is not part of it
    monkeypatch.setattr(solutions, "version", lambda: "another")
    assert coldstart.output_dir(cfg) != before
