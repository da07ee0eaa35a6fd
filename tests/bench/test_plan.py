"""`tlt bench plan` on runs that were simulated themselves: what it was not fitted to comes out as it was made."""

import json
import shutil
from pathlib import Path

import pytest

from bench.e2e import without_tail
from bench.plan import bench_plan
from bench.runs import variants
from conf.load import ConfigError, load
from conf.run import RunConfig
from tests.tlt_core.run.plan.test_fit import MOST, run

__all__ = ["run"]  # the fixture


def config(folder: Path) -> RunConfig:
    settings = [f"output_dir={folder}", "cluster.num_workers=1", f"rollout.max_live_requests={MOST}"]
    return load("conf/longtail.yaml", settings)


def test_predicted_steps_are_those_that_were_made(run: tuple[Path, list[dict[str, float]]], tmp_path: Path) -> None:
    made, rows = run
    cfg = config(tmp_path / "runs")
    for each in (*variants(cfg, made).values(), *variants(without_tail(cfg), made).values()):
        shutil.copytree(made / "steps", each.run_dir / "steps")
        (each.run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = bench_plan(cfg, repeats=1, out=tmp_path / "plan.json", command="")
    errors = {(r["workload"], r["configuration"]): r["error"] for r in report["rows"]}
    assert len(errors) == 10
    assert errors["no-tail", "plain"] == pytest.approx(0, abs=1e-3)
    assert errors["no-tail", "static"] == pytest.approx(0, abs=1e-3)
    assert report["verdicts"][0]["holds"], "with one worker nobody is idle, so nothing is streamed"


def test_runs_that_are_missing_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"bench-longtail-plain has no recorded steps; run 'tlt bench e2e'"):
        bench_plan(config(tmp_path), repeats=1, out=tmp_path / "plan.json", command="")
