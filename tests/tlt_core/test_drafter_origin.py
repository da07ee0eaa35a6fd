"""What is told of a drafter that was trained in idle time: where it comes from, and no figure that is not its own."""

import json

from tlt_core.run.drafter_release import origin_of


def test_the_first_drafters_report_is_kept_through_any_number_of_runs(tmp_path):
    report = {"policy": "p", "metrics": {"drafter/accept_len_sim": 3.5}}
    (tmp_path / "drafter.json").write_text(json.dumps(report))
    once = origin_of(tmp_path, run="demo", steps=12)
    assert once == {"run": "demo", "steps": 12, "first": report}
    assert "metrics" not in once, "they are the first drafter's: this one has moved on"
    (tmp_path / "drafter.json").write_text(json.dumps(once))
    assert origin_of(tmp_path, run="more", steps=30) == {"run": "more", "steps": 30, "first": report}


def test_a_drafter_of_unknown_origin(tmp_path):
    assert origin_of(tmp_path, run="demo", steps=3) == {"run": "demo", "steps": 3, "first": {}}
