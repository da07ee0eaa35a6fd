"""Would a test notice?  Single changes of the code, drawn at random; on each run the tests of its file's folder.

    draw changes, seeded, every file by its share -> each: change a copy, run its tests -> killed | survived | timed out

`make test-mutations` draws and runs a sample; `make test-mutations MUTATIONS=--again` runs those again that survived.
The report keeps a change's `explained`, written by hand: why no test should notice.  The operators are cosmic-ray's, in
an environment of its own; the tests run in the project's.
"""

import argparse
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cosmic_ray import plugins
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code

ROOT = Path(__file__).parents[1]
OUT = ROOT / "reports" / "mutations" / "sample.json"
TARGETS = (
    "tlt_core/tuner",
    "tlt_core/model/sampling.py",
    "tlt_core/rollout",
    "tlt_core/idle_training",
    "tlt_core/grpo",
    "tlt_core/items/checkpoint.py",
    "tlt_core/run/session.py",
    "tlt_core/cluster/dispatcher.py",
    "tlt_vllm/draft_lengths.py",
)
LEFT_OUT = ("tlt_core/rollout/vllm",)  # its tests need vLLM
MORE_TESTS = {"tlt_core/run/session.py": ["tests/tasks"]}  # beside the folder of the same name
# Of one run of tests; a change that makes a loop endless is noticed by these.
CPU_S, WALL_S, NAP_S = 400, 900, 0.25
LOGGING = {"debug", "info", "warning", "error", "exception"}
FAST = "not slow and not faults and not gpu and not vllm"
KEY = ("file", "operator", "before", "after")  # of a row in the report
UNKNOWN = "not run: its tests fail without a change"
KILLED_SINCE = "killed by a new test"


class Change(NamedTuple):
    file: str
    line: int
    operator: str
    occurrence: int


def places(file: str) -> Iterator[tuple[tuple[int, int], Change | None]]:
    """Every change of a file that an operator can make, and where.  None: it concerns a log text.  Annotations are left
    alone."""
    tree = get_ast((ROOT / file).read_text())
    for name in plugins.operator_names():
        operator_class = plugins.get_operator(name)
        if operator_class.arguments():
            continue
        found = ((node, start) for node in ast_nodes(tree) for start, _ in operator_class().mutation_positions(node))
        for occurrence, (node, start) in enumerate(found):
            if not _annotates(node):
                yield start, None if _is_logged(node) else Change(file, start[0], name, occurrence)


def _annotates(node: Any) -> bool:
    while node.parent is not None:
        parent = node.parent
        if parent.type == "annassign" and node is parent.children[1]:
            return True
        if parent.type == "tfpdef" and node is not parent.children[0]:
            return True
        if parent.type == "funcdef" and "->" in parent.children and node is parent.annotation:
            return True
        node = parent
    return False


def _is_logged(node: Any) -> bool:
    while node.parent is not None:
        parent = node.parent
        if parent.type == "trailer" and parent.children[0].value == "(":
            before = parent.get_previous_sibling()
            if before is not None and before.type == "trailer" and before.get_last_leaf().value in LOGGING:
                return True
        node = parent
    return False


def draw(count: int, seed: int) -> list[Change]:
    """Changes at random: each place of the code is as likely as any other, and then each operator there."""
    by_place: dict[tuple[str, tuple[int, int]], list[Change | None]] = {}
    for target in TARGETS:
        path = ROOT / target
        for found in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            file = found.relative_to(ROOT).as_posix()
            if not file.startswith(LEFT_OUT):
                for start, change in places(file):
                    by_place.setdefault((file, start), []).append(change)
    generator = random.Random(seed)
    # Ordered by file, and taken at equal distances: every file gets its share.
    ordered = sorted(by_place)
    first, step = generator.random(), len(ordered) / count
    chosen = [by_place[ordered[int((i + first) * step) % len(ordered)]] for i in range(count)]
    drawn = [generator.choice(changes) for changes in chosen]
    generator.shuffle(drawn)  # so that a run that is cut off is a sample as well
    return [change for change in drawn if change is not None]


def tests_of(file: str) -> list[str]:
    """The test file of the same name first, then its folder."""
    path = Path("tests") / file
    named = path.with_name(f"test_{path.name}")
    own = [named.as_posix()] if (ROOT / named).is_file() else []
    return [*own, path.parent.as_posix(), *MORE_TESTS.get(file, [])]


class Copy:
    """The tracked files in a folder of their own, where changes are made and tests run."""

    def __init__(self, folder: Path, python: Path) -> None:
        self.folder, self.python = folder, python
        self._limits: dict[tuple[str, ...], int | None] = {}  # by tests
        tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True)
        for name in filter(None, tracked.stdout.split("\0")):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)

    def run(self, tests: Sequence[str], cpu_s: int) -> tuple[int, float]:
        """pytest's exit code, or minus a signal; and the CPU time that it took."""
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",  # a changed file may have the size and second of the one before
        }
        environment.pop("PYTHONPATH", None)
        # pytest-timeout counts wall time, which says little on a busy machine.
        running = subprocess.Popen(
            [str(self.python), "-m", "pytest", "-x", "-q", "-m", FAST, "-p", "no:timeout", *tests],
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 5)),
        )
        for _ in range(int(WALL_S / NAP_S)):  # naps are counted: whoever stops this process stops its clock
            pid, status, usage = os.wait4(running.pid, os.WNOHANG)
            if pid:
                running.returncode = os.waitstatus_to_exitcode(status)
                return running.returncode, usage.ru_utime + usage.ru_stime
            time.sleep(NAP_S)
        running.kill()
        running.wait()
        return -signal.SIGXCPU, 0.0

    def limit_of(self, tests: Sequence[str]) -> int | None:
        """CPU seconds for a run with a change: three times what it takes without, and 20.  None: tests fail without."""
        if tuple(tests) not in self._limits:
            code, cpu_s = self.run(tests, CPU_S)
            self._limits[tuple(tests)] = None if code else int(3 * cpu_s) + 20
        return self._limits[tuple(tests)]

    def try_(self, row: dict[str, Any], changed: str) -> dict[str, Any]:
        path, source, tests = self.folder / row["file"], (ROOT / row["file"]).read_text(), tests_of(row["file"])
        limit = self.limit_of(tests)
        if limit is None:
            return {**row, "outcome": UNKNOWN}
        path.write_text(changed)
        try:
            code, _ = self.run(tests, limit)
        finally:
            path.write_text(source)
        if code > 2:
            raise SystemExit(f"pytest ended with {code} for {row}: no test ran, so nothing is known")
        slow = code in (-signal.SIGXCPU, -signal.SIGKILL)
        return {**row, "outcome": "survived" if code == 0 else "timed out" if slow else "killed"}


def applied(change: Change) -> tuple[dict[str, Any], str | None]:
    """The change as a row without outcome, and the source with it; None: there is no such place."""
    source = (ROOT / change.file).read_text()
    changed = mutate_code(source, plugins.get_operator(change.operator)(), change.occurrence)
    before, after = _difference(source, changed or "")
    return {**change._asdict(), "before": before, "after": after}, changed


def _difference(before: str, after: str) -> tuple[str, str]:
    pairs = zip(before.splitlines(), after.splitlines(), strict=False)
    return next(((a.strip(), b.strip()) for a, b in pairs if a != b), ("", ""))


class Report:
    def __init__(self, out: Path, seed: int, python: Path) -> None:
        self.out = out
        self.value: dict[str, Any] = json.loads(out.read_text()) if out.is_file() else {"rows": []}
        ask = "import json; from tlt_core.machine import doctor, provenance as p; "
        ask += "print(json.dumps({'commit': p.commit(), 'machine': doctor.machine()}))"
        said = subprocess.run([str(python), "-c", ask], cwd=ROOT, capture_output=True, check=True, text=True)
        self.value |= {**json.loads(said.stdout.splitlines()[-1]), "command": "make test-mutations", "seed": seed}

    def known(self, row: Mapping[str, Any]) -> dict[str, Any] | None:
        """What became of the same change before; its line may be another by now."""
        return next((old for old in self.value["rows"] if all(old[name] == row[name] for name in KEY)), None)

    def put(self, row: dict[str, Any]) -> None:
        """A new result; an explanation stays while the change survives."""
        rows, old = self.value["rows"], self.known(row)
        if old is not None:
            rows.remove(old)
            if row["outcome"] == "survived" and "explained" in old:
                row = {**row, "explained": old["explained"]}
            if old["outcome"] in ("survived", KILLED_SINCE) and row["outcome"] == "killed":
                row = {**row, "outcome": KILLED_SINCE}
        rows.append(row)
        rows.sort(key=lambda r: (r["file"], r["line"], r["operator"], r["after"]))
        self.write()

    def write(self) -> None:
        names = ["explained" if "explained" in row else row["outcome"] for row in self.value["rows"]]
        rows = self.value.pop("rows")
        self.value |= {"counts": {name: names.count(name) for name in sorted(set(names))}, "rows": rows}
        self.out.parent.mkdir(parents=True, exist_ok=True)
        partial = self.out.with_suffix(".partial")
        partial.write_text(json.dumps(self.value, indent=1) + "\n")
        partial.replace(self.out)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, default=ROOT / ".venv/bin/python", help="runs the tests")
    parser.add_argument("--count", type=int, default=240)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--again", action="store_true", help="only what survived without an explanation")
    parser.add_argument("--out", type=Path, default=OUT)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    report = Report(args.out, args.seed, args.python.absolute())
    if args.again:
        drawn = [Change(*(row[name] for name in Change._fields)) for row in report.value["rows"] if is_open(row)]
    else:
        drawn = draw(args.count, args.seed)
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder), args.python.absolute())
        for number, change in enumerate(drawn, start=1):
            row, changed = applied(change)
            if changed is None:
                row["outcome"] = "no such line"
            elif args.again or (report.known(row) or {"outcome": UNKNOWN})["outcome"] == UNKNOWN:
                row = copy.try_(row, changed)
            else:
                continue
            report.put(row)
            print(f"{number}/{len(drawn)} {row['outcome']}: {row['file']}:{row['line']} {row['after']}", flush=True)
    print(f"{report.value['counts']}; {args.out}")
    sys.exit(any(map(is_open, report.value["rows"])))


def is_open(row: Mapping[str, Any]) -> bool:
    return row["outcome"] == "survived" and "explained" not in row


if __name__ == "__main__":
    main()
