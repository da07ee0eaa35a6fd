"""A run under kills beside one that is left alone, on the smoke configuration."""

from pathlib import Path

import pytest

from bench import kills
from bench.kills import bench_kills
from conf.load import load
from tlt_core.machine import precision


@pytest.mark.parametrize("num_steps", [1, 10, 11, 35])
def test_one_step_of_ten_is_struck(num_steps: int) -> None:
    plan = kills._plan(num_steps, seed=3)
    assert [(kill.step - 1) // 10 for kill in plan] == list(range(-(-num_steps // 10)))
    assert all(0 <= kill.moment < 1 and kill.step <= num_steps for kill in plan)
    assert len({kill.victim for kill in plan}) == len(plan), "they take turns"


@pytest.mark.slow
@pytest.mark.long
def test_a_run_whose_worker_is_killed_ends_as_the_one_left_alone(tmp_path: Path) -> None:
    settings = [f"output_dir={tmp_path}/runs", f"tracking.uri=sqlite:///{tmp_path}/mlflow.db", "num_steps=3"]
    cfg = precision.settle(load("conf/smoke.yaml", settings))
    report = bench_kills(cfg, repeats=1, out=tmp_path / "kills.json", command="")
    holds = {verdict["claim"]: verdict["holds"] for verdict in report["verdicts"]}
    assert all(held for claim, held in holds.items() if "equal to the bit" in claim)
    assert holds["all steps are recorded once, in order"]
    (row,) = report["rows"]
    assert row["killed"].startswith("a worker in step ")
    assert row["kills"]["median"] == 1
