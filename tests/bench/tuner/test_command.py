"""`tlt bench tuner`: its report has a row for each policy and a verdict for each claim."""

from pathlib import Path

import pytest

from bench.tuner import command as benchmark_tuner
from bench.tuner.command import bench_tuner
from bench.tuner.simulator import Hits
from bench.tuner.workloads import SimulatedWork
from conf.load import load


@pytest.mark.prefect
def test_rows_and_verdicts(prefect_engine: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    works = {
        "good": SimulatedWork(Hits(0.8), Hits(0.0), 2, 900),
        "useless": SimulatedWork(Hits(0.0), Hits(0.0), 2, 200),
    }
    monkeypatch.setattr(benchmark_tuner, "WORKLOADS", works)
    monkeypatch.setattr(benchmark_tuner, "SWAP_LIVE", (2,))
    strategies = "rollout.speculation.strategies=[{drafter: ngram, depth: 3, tokens: 3}]"
    with pytest.raises(ValueError, match="drafter_path"):
        load("conf/smoke.yaml", ["rollout.speculation.strategies=[{drafter: eagle3, depth: 3, tokens: 3}]"])
    for overrides, arms in (([strategies], 1), ([], 6)):
        report = bench_tuner(load("conf/smoke.yaml", overrides), repeats=2, out=tmp_path / "t.json", command="by hand")
        rows = {(row["workload"], row["configuration"]): row for row in report["rows"]}
        assert len(rows) == len(report["rows"]) == 2 * (4 + arms) + 4
        fixed = [row for (work, name), row in rows.items() if work == "useless" and not name.startswith("cost")]
        assert max(row["of_best_fixed"]["median"] for row in fixed) == 1.0
        assert rows["useless", "off"]["of_best_fixed"]["min"] == 1.0
        assert [v["bound"] for v in report["verdicts"]] == [0.97, 0.97, 100, 100]
    held = {v["claim"].split(":")[0]: v["holds"] for v in report["verdicts"]}
    assert held == {"good": True, "useless": True, "2 live": True}
