"""Everything that needs a GPU, in stages, in at most eight minutes on an H100, ordered by what one learns:

    python tests/gpu_suite.py [--out reports/gpu] [--only a,b] [--device cpu] [--seconds 480]

Each stage is a process of its own, with a limit of its own.  One that fails, hangs or floods its output does not keep
the next from running.  Stages whose packages are missing are left out by name.

    OUT/STAGE.json     card, commit, versions, seconds, rows, verdicts; written while the stage runs
    OUT/logs.tar.gz    these, all logs and the small files of runs; written after each stage
    WORK/STAGE.log     the first and the last megabyte of its output; WORK/STAGE/: its files

At the end the summary, one page.  Exit code: 0 if every stage did its work; verdicts are reported, not enforced.
`--device cpu` runs the same stages at small sizes: it proves this script.  Nothing is installed.
"""

import argparse
import collections
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for the imports below: this is a script, and TLT need not be installed here

from tests import gpu_runs  # noqa: E402
from tests.gpu_report import Report, Stage, commit, machine  # noqa: E402

_ARCHIVED = (".log", ".json", ".jsonl", ".yaml", ".txt", ".xml", ".out", ".err")
_MOST_ARCHIVED = 256 * 1024  # bytes of a file
_HALF_LOG = 1 << 20
_PAGE = 11_000  # characters of the summary
_TAIL_LINES, _LINE = 6, 150
_END_S = 10.0  # for what follows a stage's end


class Part(NamedTuple):
    """A stage."""

    letter: str  # empty: only by name
    name: str
    seconds: float  # on a GPU
    work: str  # module:function, which takes a Stage
    needs: tuple[str, ...] = ()


_TLT = ("pydantic", "prefect", "mlflow", "ray", "reasoning_gym")
PARTS = (
    Part("a", "kernels", 60, "tests.gpu_stages:kernels"),
    Part("b", "rounds", 60, "tests.gpu_stages:rounds"),
    Part("c", "decoding", 60, "tests.gpu_stages:decoding"),
    Part("d", "train", 90, "tests.gpu_runs:train", _TLT),
    Part("e", "steps", 180, "tests.gpu_runs:steps", _TLT),
    Part("f", "shared", 100, "tests.gpu_runs:shared", _TLT),
    Part("g", "large", 60, "tests.gpu_stages:large"),
    *(Part("", name, 480, "tests.gpu_runs:train", (*_TLT, *run.needs)) for name, run in gpu_runs.LATER.items()),
)


def main() -> int:
    """Run the stages in turn; exit code."""
    args = _arguments()
    args.out, args.work = args.out.absolute(), args.work.absolute()
    for folder in (args.out, args.work):
        folder.mkdir(parents=True, exist_ok=True)
    if args.stage:
        return _work(args)
    if problem := _missing(args.device):
        print(f"gpu_suite: {problem}", file=sys.stderr)
        return 2
    wanted = args.only.split(",") if args.only else [part.name for part in PARTS if part.letter]
    parts = [part for part in PARTS if {part.letter, part.name} & set(wanted) - {""}]
    if unknown := set(wanted) - {part.letter for part in parts} - {part.name for part in parts}:
        names = ", ".join(f"{p.letter} ({p.name})" if p.letter else p.name for p in PARTS)
        print(f"gpu_suite: --only {','.join(sorted(unknown))}: no such stage; choose from {names}", file=sys.stderr)
        return 2
    ends, done = time.monotonic() + args.seconds, []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    for part in parts:
        limit = part.seconds if args.device == "cuda" and len(parts) > 1 else args.seconds
        done.append(_run(part, args, min(limit, ends - time.monotonic())))
        (args.work / "summary.txt").write_text(summary(done))
        _archive(args.out, args.work)
        print(f"{part.letter or '-'} {part.name:10} {done[-1]['seconds']:6.1f} s  {done[-1]['outcome']}", flush=True)
    print(summary(done))
    return int(any(not report["outcome"].startswith(("done", "left out")) for report in done))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "reports/gpu", help="folder of the reports")
    parser.add_argument("--work", type=Path, default=ROOT / "runs/gpu", help="folder of logs and runs")
    parser.add_argument("--only", metavar="STAGES", help="letters or names, a,b; one alone gets all seconds")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--seconds", type=float, default=480, help="of all stages together, at most")
    parser.add_argument("--stage", help=argparse.SUPPRESS)
    return parser.parse_args()


def _missing(device: str) -> str:
    """What is in the way, and the remedy; empty when nothing is."""
    for package in ("torch", "transformers", "pytest", *(("triton",) if device == "cuda" else ())):
        if importlib.util.find_spec(package) is None:
            return f"the package {package} is not installed here: pip install {package}"
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        return "torch sees no GPU here; run this on a machine that has one, or try the script itself with --device cpu"
    return ""


def _left_out(part: Part, device: str) -> str:
    missing = [name for name in part.needs if importlib.util.find_spec(name) is None]
    return f"{', '.join(missing)}: not installed" if missing else gpu_runs.left_out(part.name, device)


# ------------------------------------------------------------------------------------------ a stage's process


def _work(args: argparse.Namespace) -> int:
    import logging
    import pkgutil

    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)7d %(message)s")
    (part,) = (part for part in PARTS if part.name == args.stage)
    command = f"python tests/gpu_suite.py --only {part.letter or part.name} --device {args.device}"
    folder = args.work / part.name
    stage = Stage(Report(args.out / f"{part.name}.json", command=command), args.device, folder, _ends(args.seconds))
    try:
        pkgutil.resolve_name(part.work)(stage)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _ends(seconds: float) -> float:
    return time.monotonic() + seconds - _END_S


# ------------------------------------------------------------------------------------------ around it


def _run(part: Part, args: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Run one stage; returns its report, with how it ended."""
    path, log = args.out / f"{part.name}.json", args.work / f"{part.name}.log"
    path.unlink(missing_ok=True)
    began_s, outcome = time.monotonic(), ""
    if why := _left_out(part, args.device):
        outcome = f"left out: {why}"
    elif seconds <= 0:
        outcome = "no time left"
    else:
        shutil.rmtree(args.work / part.name, ignore_errors=True)
        (args.work / part.name).mkdir()
        outcome = _in_process(part, args, seconds, log)
    report = json.loads(path.read_text()) if path.is_file() else {"name": part.name, "rows": [], "verdicts": []}
    report |= {"outcome": outcome, "seconds": round(time.monotonic() - began_s, 1)}
    report = {"commit": commit(), "machine": machine(), **report}
    if not outcome.startswith(("done", "left out", "no time")):
        report["said_last"] = _tail(log)
    path.write_text(json.dumps(report, indent=1) + "\n")
    return report


def _in_process(part: Part, args: argparse.Namespace, seconds: float, log: Path) -> str:
    mark = f"TLT_GPU_STAGE={part.name}-{os.getpid()}"
    name, _, value = mark.partition("=")
    own = {
        "TRITON_CACHE_DIR": str(args.work / "triton"),  # shared by the stages; the home folder may not be writable
        "XDG_CACHE_HOME": str(args.work / "cache"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "TQDM_DISABLE": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    command = [sys.executable, sys.argv[0], "--stage", part.name, "--device", args.device, "--seconds", str(seconds)]
    command += ["--out", str(args.out), "--work", str(args.work)]
    # what is set outside wins, but for the mark
    environment = {**own, **os.environ, "PYTHONPATH": own["PYTHONPATH"], name: value}
    running = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert running.stdout is not None, "a pipe was asked for"
    copier = threading.Thread(target=_copy, args=(running.stdout, log), daemon=True)
    copier.start()
    try:
        code = running.wait(timeout=seconds)
        return "done" if code == 0 else f"failed ({code})"
    except subprocess.TimeoutExpired:
        return f"out of time ({seconds:.0f} s)"
    finally:
        _kill_marked(mark)
        running.wait()
        copier.join(timeout=_END_S)


def _copy(source: IO[bytes], target: Path) -> None:
    """The first and the last megabyte, however much comes."""
    tail: collections.deque[bytes] = collections.deque()
    written = kept = dropped = 0
    with target.open("wb", buffering=0) as file:
        while chunk := os.read(source.fileno(), 1 << 16):
            if written < _HALF_LOG:
                written += file.write(chunk) or 0
                continue
            tail.append(chunk)
            kept += len(chunk)
            while kept - len(tail[0]) >= _HALF_LOG:
                kept -= len(tail[0])
                dropped += len(tail.popleft())
        file.write((f"\n[{dropped} bytes left out]\n".encode() if dropped else b"") + b"".join(tail))


def _kill_marked(mark: str) -> None:
    """End every process of a stage, those that have left its session and its family, too: they inherit its mark."""
    for _ in range(50):
        numbers = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
        found = [pid for pid in numbers if _is_marked(pid, mark)]
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not found:
            return
        time.sleep(0.1)


def _is_marked(pid: int, mark: str) -> bool:
    try:
        return mark.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it has ended, or is another user's
        return False


def _archive(out: Path, work: Path) -> None:
    """Small enough to be carried anywhere: no file of a run above a quarter of a megabyte."""
    partial = out / ".logs.partial"
    with tarfile.open(partial, "w:gz") as archive:
        for path in sorted([*out.glob("*.json"), *work.glob("*.log"), *work.glob("*.txt")]):
            archive.add(path, path.name)
        for path in sorted(path for part in PARTS for path in (work / part.name).rglob("*")):
            if path.suffix in _ARCHIVED and _is_small(path):
                archive.add(path, path.relative_to(work))
    partial.replace(out / "logs.tar.gz")


def _is_small(path: Path) -> bool:
    return path.is_file() and not path.is_symlink() and path.stat().st_size <= _MOST_ARCHIVED


# ------------------------------------------------------------------------------------------ one page


def summary(reports: Sequence[dict[str, Any]]) -> str:
    """What a reader sees first: verdicts, what went wrong, the figures that a stage calls its own."""
    first = reports[0]["machine"]
    versions = " ".join(f"{name} {version}" for name, version in first["versions"].items())
    lines = ["", f"{', '.join(first['gpus']) or 'no GPU'}, {first['cores']} cores, driver {first['driver'] or '-'}"]
    lines += [f"python {first['python']} {versions}", f"commit {reports[0].get('commit', 'unknown')}"]
    for report in reports:
        lines.append(f"--- {report['name']}: {report['outcome']}, {report['seconds']:.0f} s")
        for verdict in report["verdicts"]:
            held = "holds " if verdict["holds"] else "MISSED"
            lines.append(f"  {held} {verdict['claim']}: {verdict['value']:.3f} (bound {verdict['bound']:g})")
        lines += [f"  {row['says']}" for row in report["rows"] if "says" in row]
        lines += [f"  ! {line}" for line in report.get("said_last", [])]
    text = "\n".join(line[:_LINE] for line in lines)
    return text if len(text) <= _PAGE else text[: _PAGE // 2] + "\n[...]\n" + text[-_PAGE // 2 :]


def _tail(log: Path) -> list[str]:
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    return [line for line in lines if line.strip()][-_TAIL_LINES:]


if __name__ == "__main__":
    sys.exit(main())
