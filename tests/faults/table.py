"""The record of a run of the matrix, and docs/faults.md from it:  python -m tests.faults.table"""

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bench.report import write_report

log = logging.getLogger(__name__)

ROOT = Path(__file__).parents[2]
RECORD, PAGE = ROOT / "reports" / "faults" / "matrix.json", ROOT / "docs" / "faults.md"
COMMAND = "make test-faults"
_LONGEST = 160  # characters of a message

_HEAD = """\
# What happens when something breaks

<!-- Written by `python -m tests.faults.table` from reports/faults/matrix.json: do not edit. -->

Each row is a fault that was made to happen to a real run (`conf/smoke.yaml`: driver, two workers, Ray, Prefect's
server, MLflow's server, scoring process), in each of the phases named. To hit a phase for certain, the driver is
stopped in it, the fault strikes, and the driver goes on. Phases are drawn from a seed, and are those of `tlt status`.

- **goes on**: the run gets on with its steps.
- **ends**: the command ends with this exit code and one message; none of its processes is left after
  {left_s:.0f} s; the same command goes on.

After each case the run is compared with one that nothing happened to: every step is recorded once, in order, with the
same rewards, and the weights in every checkpoint are the same to the bit. So is the policy at the end. Only a limit of
a worker's address space is not compared: MKL rounds otherwise without memory (docs/architecture.md).

- Command: `{command}`
- Commit: `{commit}`
- Machine: {machine}
- Cases: {passed} of {cases} as expected{rest}{conditions}
"""

_FOOT = """
## Not in the table

- **Clock set forward or back**: not run. It takes the right to set the clock of the whole machine.
- **Memory runs out**: the kernel then kills a process, as in the rows of killed processes.
- **Prefect's worker, or the server of a deployment, killed**: `tests/flows/test_deploy.py`.
- **One of several nodes lost**: `tests/flows/test_many_workers.py`.
"""


@contextmanager
def noted(book: list[dict[str, Any]], fault: str, phase: str) -> Iterator[dict[str, Any]]:
    """A row of the record; the block adds to it what came of the case."""
    row: dict[str, Any] = {"fault": fault, "phase": phase, "passed": False}
    book.append(row)
    try:
        yield row
        row["passed"] = True
    except pytest.skip.Exception as reason:
        row["not run"] = str(reason)
        raise
    except KeyboardInterrupt:
        book.remove(row)
        raise
    except Exception as error:
        log.error("%s, %s: %s", fault, phase, error)
        raise


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the record.  Cases that are in it and were not run now stay as they are, with their commit."""
    known = json.loads(path.read_text()) if path.is_file() else {"rows": [], "commit": ""}
    former = {_key(row): {"commit": known["commit"], **row} for row in known["rows"]}
    report = write_report(path, command=COMMAND, repeats=1, rows=[], verdicts=[])
    merged = {**former, **{_key(row): {"commit": report["commit"], **row} for row in rows}}
    kept = [{k: v for k, v in row.items() if (k, v) != ("commit", report["commit"])} for row in merged.values()]
    write_report(path, command=COMMAND, repeats=1, rows=kept, verdicts=[])


def page(report: Mapping[str, Any], *, left_s: float) -> str:
    rows, machine = report["rows"], report["machine"]
    not_run = [row for row in rows if "not run" in row]
    failed = [row for row in rows if not row["passed"] and "not run" not in row]
    rest = f"; {len(failed)} are not" if failed else ""
    rest += f"; {len(not_run)} not run" if not_run else ""
    head = _HEAD.format(
        left_s=left_s,
        command=report["command"],
        commit=", ".join(dict.fromkeys([report["commit"], *(row["commit"] for row in rows if "commit" in row)])),
        machine=f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gb']} GB; Python {machine['python']}",
        passed=sum(row["passed"] for row in rows),
        cases=len(rows),
        rest=rest,
        conditions=f"\n- Conditions: {report['conditions']}" if "conditions" in report else "",
    )
    lines = ["| fault | phases | what happens | noticed after | message |", "|---|---|---|---|---|"]
    groups: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["fault"], _outcome(row), _message(row)), []).append(row)
    for (fault, outcome, message), alike in groups.items():
        phases = ", ".join(dict.fromkeys(row["phase"] for row in alike))
        lines.append(f"| {fault} | {phases} | {outcome} | {_seconds(alike)} | {message} |")
    return "\n".join([head, *lines, _FOOT])


def _outcome(row: Mapping[str, Any]) -> str:
    if "not run" in row:
        return f"not run: {row['not run']}"
    if not row["passed"]:
        return "**not as expected**"
    if not row["code"]:
        return "goes on"
    how = f"killed (signal {-row['code']})" if row["code"] < 0 else f"ends, exit code {row['code']}"
    return how


def _message(row: Mapping[str, Any]) -> str:
    text = re.sub(r"\x1b\[\d+m", "", row.get("message", ""))
    text = re.sub(r"ray::(\w+\.\w+)\(\) \(pid=[^)]*\)", r"\1", text)
    text = re.sub(r"(\^+ )+|(/[\w.-]+)+/", "", text)
    text = re.sub(r"process \d+", "process N", text)
    text = re.sub(r"worker \d", "worker N", text)
    text = re.sub(r"step_\d+|lap\d+", "...", text)
    return (text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ...").replace("|", "\\|")


def _seconds(rows: Sequence[Mapping[str, Any]]) -> str:
    known = [row["seconds"] for row in rows if row.get("code") and "seconds" in row]
    if not known:
        return ""
    low, high = round(min(known)), round(max(known))
    return f"{low} s" if low == high else f"{low}-{high} s"


def _key(row: Mapping[str, Any]) -> tuple[str, str]:
    return row["fault"], row["phase"]


def main() -> None:
    from tests.faults.storm import LEFT_S

    PAGE.write_text(page(json.loads(RECORD.read_text()), left_s=LEFT_S), encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)} is up to date")


if __name__ == "__main__":
    main()
