"""What a run was made with."""

import json
from pathlib import Path

from conf.load import load
from tlt_core.machine import provenance


def test_every_attempt_is_recorded_and_the_tracker_run_survives(tmp_path: Path) -> None:
    cfg = load("conf/smoke.yaml", [f"output_dir={tmp_path}", "num_steps=7"])
    assert provenance.tracker_run_id(cfg.run_dir) == ""
    provenance.begin_attempt(cfg)
    provenance.keep_tracker_run_id(cfg.run_dir, "abc")
    provenance.begin_attempt(cfg)
    provenance.end_attempt(cfg.run_dir, took_s={"updates": 1.96})
    assert provenance.tracker_run_id(cfg.run_dir) == "abc"
    record = json.loads((cfg.run_dir / "run.json").read_text())
    assert len(record["attempts"]) == 2
    assert {"started", "commit", "argv", "machine"} <= record["attempts"][0].keys()
    assert "took_s" not in record["attempts"][0]
    assert record["attempts"][1]["took_s"] == {"updates": 2.0}
    assert load(cfg.run_dir / "config.yaml") == cfg
