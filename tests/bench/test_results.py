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
    "name": "idle-small",
    "commit": "0123456789abcdef",
    "command": "tlt bench idle conf/smoke.yaml --out x/idle-small.json --repeats 3",
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
    reports = results.load_reports(ROOT / "reports")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert (ROOT / "docs" / "results.md").read_text(encoding="utf-8") == results.page(reports), AGAIN
    assert readme == results.replace_table(readme, results.readme_table(reports)), AGAIN


def test_every_verdict_of_every_report_is_on_the_page() -> None:
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    for path in (ROOT / "reports").glob("*.json"):
        report = json.loads(path.read_text())
        section = page.split(f"\n## {path.stem}\n")[1].split("\n## ")[0]
        assert f"`{report['commit']}`" in section
        assert f"`{report['command'].split(' --out ')[0]}" in section
        assert section.count("| holds |") + section.count("| **missed** |") == len(report.get("verdicts", ()))
        missed = [v["claim"] for v in report.get("verdicts", ()) if not v["holds"]]
        assert section.count("| **missed** |") == len(missed)
        for claim in missed:
            assert claim in page.split("## Missed bounds")[1].split("\n## ")[0]


def test_the_readme_has_five_rows_with_machine_command_and_report() -> None:
    table = results.readme_table(results.load_reports(ROOT / "reports"))
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 5
    for row in rows:
        cells = row.strip("| ").split(" | ")
        assert len(cells) == 4
        assert cells[2]
        for source in cells[3].split("<br>"):
            assert source.startswith("`tlt bench ")
            assert "](docs/results.md#" in source


def test_a_new_report_appears_by_itself(tmp_path: Path) -> None:
    (tmp_path / "idle-small.json").write_text(json.dumps(REPORT))
    reports = results.load_reports(tmp_path)
    page, table = results.page(reports), results.readme_table(reports)
    assert "## idle-small\n" in page
    assert "- Machine: Some CPU, limited to avx2, 4 cores, 2 threads, 8.0 GB; Python 3.11.7" in page
    assert "- Command: `tlt bench idle conf/smoke.yaml --repeats 3`" in page
    assert "- Environment: `TLT_NATIVE_KERNELS=avx2`" in page
    assert "| 1.25 (1.125-1.5) | at most 1.01 | **missed** |" in page
    assert "| same tokens | 1 | 1 | holds |" in page
    assert "| steps | 1.25 (1.125-1.5) |\n| all steps | 1.25 |" in page
    assert "1.25 (at most 1.01, **missed**) | Some CPU, limited to avx2, 4 cores |" in table
    assert table.endswith("Bounds in `reports/`: 1 hold, 1 are missed ([which](docs/results.md#missed-bounds)).")


def test_a_report_without_verdicts_and_of_an_unknown_kind_is_shown(tmp_path: Path) -> None:
    report = {key: value for key, value in REPORT.items() if key not in ("verdicts", "environment", "repeats")}
    report |= {"command": "make demo", "rows": [{"figure": "seconds", "value": 600}]}
    (tmp_path / "demo.json").write_text(json.dumps(report))
    page = results.page(results.load_reports(tmp_path))
    assert "## Missed bounds\n\nNone.\n" in page
    assert "- Command: `make demo`" in page
    assert "| value | 600 |" in page


def test_a_file_that_is_no_report_is_named(tmp_path: Path) -> None:
    (tmp_path / "notes.json").write_text("{}")
    with pytest.raises(ValueError, match=r"notes\.json is no report"):
        results.load_reports(tmp_path)


def test_a_readme_without_the_comments_is_refused() -> None:
    with pytest.raises(ValueError, match="put both back"):
        results.replace_table("# TLT\n", "| a |")
