"""README.md and docs/results.md say what the reports say.

The claims: both pages are the generator's output; a report of any name and kind appears with machine, commit and
command; a missed bound is shown as missed.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from bench import results

ROOT = Path(__file__).parents[2]
AGAIN = "run `python -m bench.results` and commit what it writes"
REPORT: dict[str, Any] = {
    "name": "step-small",
    "commit": "0123456789abcdef",
    "command": "tlt bench step conf/smoke.yaml --out x/step-small.json --repeats 3",
    "machine": {"cores": 4, "threads": 2, "memory_gb": 8.0, "cpu": "Some CPU", "python": "3.11.7"},
    "repeats": 3,
    "environment": {"TLT_NATIVE_KERNELS": "avx2"},
    "rows": [
        {"configuration": "steps", "step_ratio": {"median": 1.25, "min": 1.125, "max": 1.5}},
        {"configuration": "all steps", "step_ratio": 1.25},
    ],
    "verdicts": [
        {
            "claim": "step time, training in idle time over none, all steps",
            "value": 1.25,
            "spread": [1.125, 1.5],
            "bound": 1.01,
            "holds": False,
        },
        {"claim": "same tokens", "value": 1.0, "spread": [1.0, 1.0], "bound": 1.0, "holds": True},
    ],
}


def test_both_pages_are_what_the_reports_say() -> None:
    reports, older = (results.load_reports(ROOT / folder) for folder in ("reports", "reports/history"))
    results.require_one_commit(reports)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert (ROOT / "docs" / "results.md").read_text(encoding="utf-8") == results.page(reports, older), AGAIN
    assert readme == results.replace_table(readme, results.readme_table(reports)), AGAIN


def test_a_new_report_appears_by_itself(tmp_path: Path) -> None:
    (tmp_path / "step-small.json").write_text(json.dumps(REPORT))
    reports = results.load_reports(tmp_path)
    page, table = results.page(reports, {}), results.readme_table(reports)
    assert "## step-small\n" in page
    assert "- Machine: Some CPU, AVX2, 4 cores, 2 threads, 8.0 GB; Python 3.11.7" in page
    assert "- Command: `tlt bench step conf/smoke.yaml --repeats 3`" in page
    assert "- Environment: `TLT_NATIVE_KERNELS=avx2`" in page
    assert "| 1.25 (1.125-1.5) | at most 1.01 | **missed** |" in page
    assert "| same tokens | 1 | 1 | holds |" in page
    assert "| steps | 1.25 (1.125-1.5) |\n| all steps | 1.25 |" in page
    assert "Of 2 targets set beforehand, 1 are met ([which](docs/results.md#missed-bounds) are not)." in table


def test_reports_of_a_machine_are_of_one_clean_commit() -> None:
    elsewhere = {**REPORT, "machine": {**REPORT["machine"], "cpu": "Another CPU"}, "commit": "fedc"}
    results.require_one_commit({"a": REPORT, "b": elsewhere})
    with pytest.raises(ValueError, match=r"reports/a\.json is of 012345678 and reports/b\.json of fedc"):
        results.require_one_commit({"a": REPORT, "b": {**REPORT, "commit": "fedc"}})
    with pytest.raises(ValueError, match=r"reports/a\.json: files had changed since fedc"):
        results.require_one_commit({"a": {**REPORT, "commit": "fedc-dirty"}})


def test_whole_steps_stand_in_the_readme_by_part_and_machine() -> None:
    rows = [
        {"workload": workload, "configuration": name, "over_plain_in_all": {"median": ratio, "min": 1.0, "max": 2.0}}
        for workload, factor in (("tail", 1.0), ("no-tail", 3.0))
        for name, ratio in (("fixed", 1.125 * factor), ("tlt", 1.25 * factor))
    ]
    table = results.readme_table({"e2e": {**REPORT, "rows": rows}})
    assert "| | Some CPU, AVX2, 4 cores |" in table
    assert "| speculation with one draft length | 1.12 |" in table
    assert "| **all of TLT** | 1.25 |" in table
    assert "a whole RL step 1.25 times as fast" in table
