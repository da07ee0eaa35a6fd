"""`tlt bench tuner`: its report has a row for each policy and a verdict for each claim."""

from pathlib import Path

import pytest

from conf.load import load
from flows import benchmark_tuner
from flows.benchmark_tuner import bench_tuner
from tlt_core.bench_tuner import PlantedWork
from tlt_core.tuner.simulator import Hits


@pytest.mark.prefect
def test_rows_and_verdicts(prefect_engine: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    works = {"good": PlantedWork(Hits(0.8), Hits(0.0), 2, 900), "useless": PlantedWork(Hits(0.0), Hits(0.0), 2, 200)}
    monkeypatch.setattr(benchmark_tuner, "WORKLOADS", works)
    monkeypatch.setattr(benchmark_tuner, "SWAP_LIVE", (2,))
    menu = "rollout.speculation.menu=[{drafter: ngram, depth: 3, tokens: 3}]"
    with pytest.raises(ValueError, match="drafter_path"):
        load("conf/smoke.yaml", ["rollout.speculation.menu=[{drafter: eagle3, depth: 3, tokens: 3}]"])
    for overrides, arms in (([menu], 1), ([], 6)):
        report = bench_tuner(load("conf/smoke.yaml", overrides), repeats=2, out=tmp_path / "t.json", command="by hand")
        rows = {(row["workload"], row["configuration"]): row for row in report["rows"]}
        assert len(rows) == len(report["rows"]) == 2 * (4 + arms) + 4
        fixed = [row for (work, name), row in rows.items() if work == "useless" and not name.startswith("cost")]
        assert max(row["of_best_fixed"]["median"] for row in fixed) == 1.0
        assert rows["useless", "off"]["of_best_fixed"]["min"] == 1.0
        assert [v["bound"] for v in report["verdicts"]] == [0.97, 0.97, 100, 100]
    held = {v["claim"].split(":")[0]: v["holds"] for v in report["verdicts"]}
    assert held == {"good": True, "useless": True, "2 live": True}


def test_a_bound_itself_holds() -> None:
    verdict = benchmark_tuner._verdict("x", [0.9, 0.97, 1.0], 0.97, at_least=True)
    assert verdict == {"claim": "x", "value": 0.97, "spread": [0.9, 1.0], "bound": 0.97, "holds": True}
    assert not benchmark_tuner._verdict("x", [0.9, 0.969, 1.0], 0.97, at_least=True)["holds"]
    assert benchmark_tuner._verdict("x", [90, 100, 300], 100, at_least=False)["holds"]
    assert not benchmark_tuner._verdict("x", [90, 101, 300], 100, at_least=False)["holds"]
