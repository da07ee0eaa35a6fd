"""`tlt report`: what it writes, and what it says of input that names no run."""

import json
from pathlib import Path

import pytest

from conf.load import load
from flows import cli
from tlt_core.machine import provenance

pytestmark = pytest.mark.usefixtures("quiet_command")


def _run(folder: Path) -> Path:
    """A run of one step: 6 s of rollouts, 1.5 times as fast as plain ones."""
    cfg = load("conf/smoke.yaml", [f"output_dir={folder}"])
    provenance.begin_attempt(cfg)
    row = {"step": 1, "timing_s/step": 9.0, "timing_s/gen": 6.0, "rollout/spec_speedup_est": 1.5}
    (cfg.run_dir / "metrics.jsonl").write_text(json.dumps(row) + '\n{"step": 2, "crit')  # killed in the second step
    return cfg.run_dir


def test_a_folder_and_its_configuration_make_the_same_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir, other = _run(tmp_path), tmp_path / "new" / "page.html"
    assert cli.main(["report", str(run_dir)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("3.0 s saved of about 12.0 s in 1 step (25%, estimate); speculation +3.0 s; ")
    assert f"report: {run_dir / 'report.html'}" in said
    assert cli.main(["report", str(run_dir / "config.yaml"), "--out", str(other)]) == 0
    assert other.read_text() == (run_dir / "report.html").read_text()


def test_what_is_no_run_is_refused_in_one_paragraph(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "mine.yaml"
    config.write_text(f"base: {Path('conf/smoke.yaml').absolute()}\noutput_dir: {tmp_path}/runs\n")
    for named, reason in (
        (str(tmp_path / "nowhere"), "nowhere: neither a folder nor a file; name a run's folder, such as"),
        (str(config), "has no folder"),
        (str(tmp_path), "has no config.yaml and no metrics.jsonl"),
    ):
        assert cli.main(["report", named]) == 2
        said = capsys.readouterr().err
        assert said.startswith("tlt report: ")
        assert reason in said
        assert said.count("\n") == 1
