"""The report of a demo run, from the run's own records."""

import json

import pytest

from bench.demo import bench_demo
from conf.load import load


@pytest.fixture
def finished(tmp_path):
    cfg = load("conf/smoke.yaml", [f"output_dir={tmp_path}"])
    cfg.run_dir.mkdir()
    attempt = {
        "commit": "abc",
        "machine": {"cpu": "a processor"},
        "took_s": {"cold start": 80.0, "updates": 20.0},
    }
    name = f"val-core/all/reward/mean_at_{cfg.evaluation.num_samples}"
    steps = [
        {"step": 0, "val-core/all/reward/greedy": 0.5, name: 0.4},
        {"step": 9, "val-core/all/reward/greedy": 0.6, name: 0.6},
    ]
    (cfg.run_dir / "run.json").write_text(json.dumps({"attempts": [attempt]}))
    (cfg.run_dir / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    (cfg.run_dir / "log.txt").write_text(
        "2026-01-01 10:00:00,000 a\n2026-01-01 10:00:12,500 b\n  a line of a traceback\n2026-01-01 10:00:13,000 c\n"
    )
    return cfg


def test_the_report_is_made_of_the_runs_own_records(finished, tmp_path):
    report = bench_demo(finished, repeats=1, out=tmp_path / "demo.json", command="by hand")
    values = {v["claim"].split(",")[0]: (round(v["value"], 3), v["holds"]) for v in report["verdicts"]}
    assert values["the whole run takes at most 15 minutes"] == (100.0, True)
    assert values["RL steps"] == (9, True)
    assert values["rise of the mean validation reward"] == (0.2, True)
    assert values["longest time without a line"] == (12.5, True)
    assert report["machine"] == {"cpu": "a processor"}
    assert json.loads((tmp_path / "demo.json").read_text()) == report


def test_a_resumed_run_has_no_time_of_its_own(finished, tmp_path):
    record = finished.run_dir / "run.json"
    record.write_text(json.dumps({"attempts": json.loads(record.read_text())["attempts"] * 2}))
    with pytest.raises(ValueError, match="remove the folder and run again"):
        bench_demo(finished, repeats=1, out=tmp_path / "demo.json", command="by hand")
