"""Every two values of options meet: in a run of two steps that ends with finite metrics, or in a refusal at the start.

`make test-options` makes all runs of `runs.csv`.
"""

import math

import pytest

from tests import forked_ray
from tests.options import runs, table
from tests.options.table import OPTIONS, Run
from tlt_core.rollout.vllm.environment import vllm_python

RUNS = table.read()


def _is_named(option: str, value: str, text: str) -> bool:
    """Does the message name a key of this value, or the key's section?"""
    keys = [setting.partition("=")[0] for setting in OPTIONS[option][value]]
    return any(key in text or f"{key.rpartition('.')[0]}:" in text for key in keys)


def test_every_pair_is_in_a_run_or_is_refused_by_name() -> None:
    covered = {pair for run in RUNS for pair in table.pairs(run)}
    refused = 0
    for pair in set(table.every_pair()) - covered:
        text, parts = table.refusal(dict(pair)), sorted(pair)
        assert text, f"{parts} are in no run: see tests/options/table.py"
        alone = [part for part in parts if table.refusal(dict([part]))]
        for option, value in alone or parts:
            assert _is_named(option, value, text), f"{option}={value} is not named: {text}"
        assert "set " in text or "lower " in text, f"no remedy: {text}"
        refused += 1
    assert refused >= 20


@pytest.mark.parametrize("run", RUNS, ids=map(str, range(len(RUNS))))
def test_a_run_of_the_table_is_accepted(run: Run) -> None:
    assert table.refusal(run) == ""


_IN_CI = 9  # runs


def _marked(number: int, run: Run) -> object:
    marks = [pytest.mark.slow, *([pytest.mark.vllm] if run["engine"] == "vllm" else [])]
    marks += [pytest.mark.long] if number >= _IN_CI else []
    return pytest.param(number, marks=marks, id=f"{number}-{run['engine']}")


@pytest.mark.parametrize("number", [_marked(number, run) for number, run in enumerate(RUNS)])
def test_two_steps(parts: runs.Parts, number: int) -> None:
    run = RUNS[number]
    if run["engine"] == "vllm" and not vllm_python().exists():
        pytest.skip("vLLM is not installed: make vllm-env")
    with forked_ray.in_place_of_ray():
        steps = runs.train(parts, f"run-{number}", table.settings(run))
    assert [step["training/policy_version"] for step in steps] == [1, 2]
    for step in steps:
        assert {name: value for name, value in step.items() if not math.isfinite(value)} == {}
        assert {"actor/grad_norm", "actor/pg_loss", "critic/rewards/mean", "rollout/checksum"} <= step.keys()
