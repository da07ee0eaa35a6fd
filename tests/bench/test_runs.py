"""Which steps of a benchmark's run count, and what of them."""

import json
from pathlib import Path

import pytest

from bench.runs import ratios, steps_of
from conf.load import load


def test_the_first_step_of_a_block_does_not_count_nor_does_the_checkpoint_that_ends_it(tmp_path: Path) -> None:
    cfg = load("conf/smoke.yaml", [f"output_dir={tmp_path}", "name=r"])
    cfg.run_dir.mkdir()
    rows = [
        {"step": 0, "training/resume_attempt": 0, "timing_s/testing": 1.0},
        {"step": 1, "training/resume_attempt": 0, "timing_s/step": 30.0},
        {"step": 2, "training/resume_attempt": 0, "timing_s/step": 15.0, "timing_s/save_checkpoint": 5.0},
        {"step": 3, "training/resume_attempt": 1, "timing_s/step": 40.0},
        {"step": 4, "training/resume_attempt": 1, "timing_s/step": 20.0},
    ]
    (cfg.run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    counted = steps_of(cfg)
    assert [(row["step"], row["timing_s/step"]) for row in counted] == [(2, 10.0), (4, 20.0)]
    assert [row["step"] for row in steps_of(cfg, with_first=True)] == [1, 2, 3, 4]
    other = [{"step": 4, "timing_s/step": 5.0}]
    assert ratios(counted, other, "timing_s/step") == pytest.approx([4.0])
