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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
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
    "tlt_core/spot",
    "tlt_core/grpo",
    "tlt_core/items/checkpoint.py",
    "tlt_core/run/session.py",
    "tlt_core/cluster/dispatcher.py",
    "tlt_vllm/draft_lengths.py",
)
LEFT_OUT = ("tlt_core/rollout/vllm",)  # its tests need vLLM
MORE_TESTS = {"tlt_core/run/session.py": ["tests/tasks"]}  # beside the folder of the same name
CPU_S, WALL_S = 400, 900  # of one run of tests; a change that makes a loop endless is noticed by these
FAST = "not slow and not faults and not gpu and not vllm"


class Change(NamedTuple):
    """One change of one place."""

    file: str
    line: int
    operator: str
    occurrence: int


def places(file: str) -> Iterator[tuple[tuple[int, int], Change]]:
    """Every change of a file that an operator can make, with where it stands; annotations are left alone."""
    tree = get_ast((ROOT / file).read_text())
    for name in plugins.operator_names():
        operator_class = plugins.get_operator(name)
        if operator_class.arguments():
            continue
        found = ((node, start) for node in ast_nodes(tree) for start, _ in operator_class().mutation_positions(node))
        for occurrence, (node, start) in enumerate(found):
            if not _annotates(node):
                yield start, Change(file, start[0], name, occurrence)


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


def draw(count: int, seed: int) -> list[Change]:
    """Changes at random: each place of the code is as likely as any other, and then each operator there."""
    by_place: dict[tuple[str, tuple[int, int]], list[Change]] = {}
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
    return drawn


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
        self._passes: set[str] = set()  # folders of tests that pass without a change
        tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True)
        for name in filter(None, tracked.stdout.split("\0")):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)

    def run(self, tests: Sequence[str], cpu_s: int) -> int:
        """pytest's exit code, or minus a signal."""
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",  # a changed file may have the size and second of the one before
            "TLT_HOME": os.environ.get("TLT_HOME", str(ROOT / "artifacts")),
        }
        environment.pop("PYTHONPATH", None)
        try:
            return subprocess.run(
                [str(self.python), "-m", "pytest", "-x", "-q", "-m", FAST, "-p", "no:randomly", *tests],
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=WALL_S,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 5)),
            ).returncode
        except subprocess.TimeoutExpired:
            return -signal.SIGXCPU

    def try_(self, change: Change) -> dict[str, Any]:
        """Make the change, run its tests, take it back."""
        path, source = self.folder / change.file, (ROOT / change.file).read_text()
        tests = tests_of(change.file)
        if str(tests[-1]) not in self._passes:
            code = self.run(tests, CPU_S)
            if code:
                raise SystemExit(f"pytest ends with {code} on the code as it is: mend {' '.join(tests)} first")
            self._passes.add(tests[-1])
        changed = mutate_code(source, plugins.get_operator(change.operator)(), change.occurrence)
        before, after = _difference(source, changed)
        path.write_text(changed)
        try:
            code = self.run(tests, CPU_S)
        finally:
            path.write_text(source)
        if code > 2:
            raise SystemExit(f"pytest ended with {code} for {change}: no test ran, so nothing is known")
        outcome = "survived" if code == 0 else "timed out" if code == -signal.SIGXCPU else "killed"
        return {**change._asdict(), "before": before, "after": after, "outcome": outcome}


def _difference(before: str, after: str) -> tuple[str, str]:
    pairs = zip(before.splitlines(), after.splitlines(), strict=False)
    return next(((a.strip(), b.strip()) for a, b in pairs if a != b), ("", ""))


class Report:
    """The JSON file, written after every change."""

    def __init__(self, out: Path, seed: int) -> None:
        self.out = out
        self.value: dict[str, Any] = json.loads(out.read_text()) if out.is_file() else {"rows": []}
        self.value |= {"command": "make test-mutations", "operators": "cosmic-ray", "seed": seed}

    def known(self, change: Change) -> dict[str, Any] | None:
        """The row of a change, if it was run."""
        same = (row for row in self.value["rows"] if Change(*(row[name] for name in Change._fields)) == change)
        return next(same, None)

    def put(self, row: dict[str, Any]) -> None:
        """A new result; an explanation stays."""
        rows = self.value["rows"]
        old = self.known(Change(*(row[name] for name in Change._fields)))
        if old is not None:
            rows.remove(old)
            row = {**row, **{key: old[key] for key in ("explained",) if key in old and row["outcome"] == "survived"}}
            if old["outcome"] == "survived" and row["outcome"] != "survived":
                row["outcome"] = "killed by a new test"
        rows.append(row)
        rows.sort(key=lambda r: (r["file"], r["line"], r["operator"], r["occurrence"]))
        counts: dict[str, int] = {}
        for each in rows:
            name = "explained" if "explained" in each else each["outcome"]
            counts[name] = counts.get(name, 0) + 1
        self.value["counts"] = dict(sorted(counts.items()))
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.out.write_text(json.dumps(self.value, indent=1) + "\n")


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, default=ROOT / ".venv/bin/python", help="runs the tests")
    parser.add_argument("--count", type=int, default=220)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--again", action="store_true", help="only what survived without an explanation")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    report = Report(args.out, args.seed)
    if args.again:
        rows = [row for row in report.value["rows"] if row["outcome"] == "survived" and "explained" not in row]
        todo = [Change(*(row[name] for name in Change._fields)) for row in rows]
    else:
        todo = [change for change in draw(args.count, args.seed) if report.known(change) is None]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.processes) as pool:
        copies: SimpleQueue[Copy] = SimpleQueue()
        for number in range(args.processes):
            copies.put(Copy(Path(folder) / str(number), args.python.absolute()))

        def job(change: Change) -> dict[str, Any]:
            copy = copies.get()
            try:
                return copy.try_(change)
            finally:
                copies.put(copy)

        for done, row in enumerate(pool.map(job, todo), start=1):
            report.put(row)
            print(f"{done}/{len(todo)} {row['outcome']}: {row['file']}:{row['line']} {row['after']}", flush=True)
    survived = report.value.get("counts", {}).get("survived", 0)
    print(f"{report.value.get('counts')}; {args.out}")
    sys.exit(bool(survived))


if __name__ == "__main__":
    main()
