"""Everything that needs a GPU, in one command, on a machine that has only torch, Triton, transformers and pytest:

    python tests/gpu_suite.py OUT [--only PART] [--device cpu] [--seconds 480] [--repeats 3]

run-...   does a run train, stop, go on: our engine, DeepSpeed,     OUT/run-....json
          LoRA, vLLM, two GPUs (needs all packages of TLT)
tests     all tests that are marked gpu and can be imported here    OUT/tests.json
kernels   bytes and operations a second of every op                 OUT/kernels.json
sizes     plain beside adaptive decoding at the shapes of           OUT/sizes-SHAPE.json
          SmolLM2-135M, Qwen2.5-7B, Llama-3-8B
          (random weights, planted acceptance)

Each part is a process of its own: one that crashes the device does not take the others with it.  It is ended after
`--seconds`.  A part whose packages or GPUs are missing here is left out, and OUT/summary.json says why.  `--only` runs
one part by itself, and adds it to the summary.

Exit code: 0 if all runs did what they have to, every test passed and no part failed; verdicts of benchmarks are
reported, not enforced.  `--device cpu` runs the same parts at small sizes: it proves this script.
"""

import argparse
import importlib.util
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for the import below: this is a script, and TLT need not be installed here

from tests import gpu_runs  # noqa: E402

SHAPES = {"cuda": ("smollm2-135m", "qwen2.5-7b", "llama-3-8b"), "cpu": ("tiny",)}
ACCEPTANCE = 4.0
LEFT_OUT = "left out: "
NEEDS = {"prefect": ("tests/flows", "tests/bench"), "pydantic": ("tests/tlt_core/test_devices",)}  # what tests import


def main() -> int:
    """Run the parts in turn, or the one that was named."""
    args = _arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.part is not None:
        return _part(args)
    missing = _missing(args.device)
    if missing:
        print(f"gpu_suite: {missing}", file=sys.stderr)
        return 2
    parts = [*gpu_runs.RUNS, "tests", "kernels", *(f"sizes-{shape}" for shape in SHAPES[args.device])]
    if args.only is not None and args.only not in parts:
        print(f"gpu_suite: --only {args.only}: there is no such part; choose from {', '.join(parts)}", file=sys.stderr)
        return 2
    began_s, summary_file = time.perf_counter(), args.out / "summary.json"
    results: dict[str, dict[str, Any]] = {}
    if args.only is not None and summary_file.is_file():
        results = json.loads(summary_file.read_text())["parts"]
    for part in parts if args.only is None else [args.only]:
        results[part] = _in_process(part, args)
        print(f"{part:20} {results[part]['seconds']:6.1f} s  {results[part]['outcome']}", flush=True)
    summary = {"machine": machine(), "seconds": time.perf_counter() - began_s, "parts": results}
    summary_file.write_text(json.dumps(summary, indent=1) + "\n")
    _print_verdicts(args.out)
    return 0 if all(result["outcome"].startswith(("done", LEFT_OUT)) for result in results.values()) else 1


def machine() -> dict[str, Any]:
    """What ran this."""
    import torch

    versions = {name: _version(name) for name in ("torch", "triton", "transformers", "pytest")}
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpus": gpus,
        "versions": versions,
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder for the reports")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--seconds", type=float, default=480, help="of each part, at most")
    parser.add_argument("--only", metavar="PART", help="this part alone: run-own, ..., tests, kernels, sizes-SHAPE")
    parser.add_argument("--repeats", type=int, default=3, help="of every measurement")
    parser.add_argument("--part", help=argparse.SUPPRESS)
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


def _in_process(part: str, args: argparse.Namespace) -> dict[str, Any]:
    if part in gpu_runs.RUNS and (why := gpu_runs.left_out(part, args.device)):
        return {"outcome": f"{LEFT_OUT}{why}", "seconds": 0.0}
    own = ["--device", args.device, "--repeats", str(args.repeats), "--part", part]
    began_s = time.perf_counter()
    with (args.out / f"{part}.log").open("w") as log:
        command = [sys.executable, __file__, str(args.out), *own]
        running = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
        try:
            code = running.wait(timeout=args.seconds)
            outcome = "done" if code == 0 else f"failed ({code})"
        except subprocess.TimeoutExpired:
            outcome = "out of time"
        finally:
            if running.poll() is None:  # with what it has started: pytest would keep the device's memory
                os.killpg(running.pid, signal.SIGKILL)
                running.wait()
    return {"outcome": outcome, "seconds": time.perf_counter() - began_s}


def _part(args: argparse.Namespace) -> int:
    import logging

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if args.part == "tests":
        return _tests(args.out, args.device)
    if args.part in gpu_runs.RUNS:
        rows, verdicts = gpu_runs.run(args.part, args.device, args.out / f"{args.part}-files")
        _write(args.out / f"{args.part}.json", args, rows, verdicts)
        return int(not all(verdict["holds"] for verdict in verdicts))
    import torch

    from bench.kernels import ops as bench_kernels
    from bench.sizes import measure as bench_sizes

    device = torch.device(args.device)
    if args.part == "kernels":
        shapes = bench_kernels.QWEN_7B if args.device == "cuda" else bench_kernels.SMALL
        rows, verdicts = bench_kernels.run(device, shapes, repeats=args.repeats), []
    else:
        shape = args.part.removeprefix("sizes-")
        rows, verdicts = bench_sizes.run(shape, device, acceptance=ACCEPTANCE, repeats=args.repeats)
    _write(args.out / f"{args.part}.json", args, rows, verdicts)
    return 0


def _tests(out: Path, device: str) -> int:
    """pytest decides (5, no test was collected, is a failure here, too), and on a GPU no test may be skipped."""
    record = out / "tests.xml"
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-rs", f"--junitxml={record}", *gpu_test_files()]
    own = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # whatever else is installed there
    code = subprocess.run(command, cwd=ROOT, env=own).returncode  # ends with this part's process group
    suites = ET.parse(record).getroot().iter("testsuite")
    counts = {name: 0 for name in ("tests", "failures", "errors", "skipped")}
    for suite in suites:
        counts = {name: count + int(suite.get(name, 0)) for name, count in counts.items()}
    (out / "tests.json").write_text(json.dumps({"machine": machine(), **counts, "files": gpu_test_files()}, indent=1))
    return code or int(device == "cuda" and counts["skipped"] > 0)


def gpu_test_files() -> list[str]:
    """Test files with a test that is marked gpu, or that takes its device from the kernels' fixture."""
    found = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        name = path.relative_to(ROOT).as_posix()
        if any(name.startswith(NEEDS[p]) and importlib.util.find_spec(p) is None for p in NEEDS):
            continue
        text = path.read_text()
        on_fixture = name.startswith("tests/kernels/") and re.search(r"\bdevice: str", text)
        if on_fixture or "pytest.mark.gpu" in text:
            found.append(name)
    return found


def _write(
    path: Path, args: argparse.Namespace, rows: Sequence[Mapping[str, Any]], verdicts: Sequence[Mapping[str, Any]]
) -> None:
    """As `bench.report.write_report`, without what that imports."""
    report = {
        "name": path.stem,
        "commit": _commit(),
        "command": f"python tests/gpu_suite.py OUT --only {path.stem} --device {args.device} --repeats {args.repeats}",
        "machine": machine(),
        "repeats": args.repeats,
        "rows": list(rows),
        "verdicts": list(verdicts),
    }
    path.write_text(json.dumps(report, indent=1) + "\n")


def _print_verdicts(out: Path) -> None:
    for path in sorted([*out.glob("run-*.json"), *out.glob("sizes-*.json")]):
        for verdict in json.loads(path.read_text())["verdicts"]:
            held = "holds" if verdict["holds"] else "FAILS"
            print(f"{held}: {path.stem}: {verdict['claim']}: {verdict['value']:.3f} (bound {verdict['bound']})")


def _commit() -> str:
    """Empty where this is not a clone."""
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip()


def _version(package: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


if __name__ == "__main__":
    sys.exit(main())
