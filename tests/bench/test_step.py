"""`tlt bench step` on the smoke configuration."""

from pathlib import Path

import pytest

from bench.step import bench_step
from conf.load import load


@pytest.mark.slow
@pytest.mark.prefect
def test_bench_step_measures_the_steps_after_the_first(
    prefect_engine: None, embedded_model: Path, tmp_path: Path
) -> None:
    cfg = load("conf/smoke.yaml", [f"output_dir={tmp_path}/runs", f"tracking.uri=sqlite:///{tmp_path}/mlflow.db"])
    report = bench_step(cfg, repeats=2, out=tmp_path / "step.json", command="by hand")
    (row,) = report["rows"]
    assert row["configuration"] == "smoke"
    assert 0 < row["timing_s/gen"]["median"] <= row["timing_s/step"]["max"]
    assert [v["bound"] for v in report["verdicts"]] == [0.70, 4.0, 0.03]
    assert not (tmp_path / "runs/bench-smoke/checkpoints").exists()
