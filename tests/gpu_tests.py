"""The tests that need a GPU, as part of a stage of `tests/gpu_suite.py`."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET

from bench.verdicts import verdict
from tests.gpu_report import ROOT, Stage

NEEDS = {"prefect": ("tests/flows", "tests/bench"), "pydantic": ("tests/tlt_core/test_devices",)}  # what tests import
_PROCESSES = 12  # of pytest: most of a test's time is compiling


def run_tests(stage: Stage, under: str, seconds: float) -> None:
    """The tests below a folder that need a GPU; on a GPU none may be skipped.  pytest is asked to end in time, so that
    it says what it has seen."""
    record, files = stage.folder / "tests.xml", [f for f in gpu_test_files() if f.startswith(under)]
    if stage.device != "cuda":
        files = [f for f in files if "sampling" in f or "rollout" in f]
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-rfE", "--tb=short", f"--junitxml={record}", *files]
    if stage.device == "cuda" and importlib.util.find_spec("xdist") is not None:
        command += ["-p", "xdist.plugin", "-n", str(min(_PROCESSES, os.cpu_count() or 1))]
    own = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # whatever else is installed there
    running = subprocess.Popen(command, cwd=ROOT, env=own)
    try:
        running.wait(timeout=max(5.0, seconds))
    except subprocess.TimeoutExpired:
        running.send_signal(signal.SIGINT)
        running.wait()
    suites = list(ET.parse(record).getroot().iter("testsuite")) if record.is_file() else []
    counts = {
        name: sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "failures", "errors", "skipped")
    }
    for case in (case for suite in suites for case in suite.iter("testcase")):
        for fault in [*case.iter("failure"), *case.iter("error")]:
            stage.report.add({"says": f"{case.get('name')}: {fault.get('message', '').partition(chr(10))[0]}"})
    failed = counts["failures"] + counts["errors"] + (counts["skipped"] if stage.device == "cuda" else 0)
    failed += running.returncode not in (0, 1)  # not all have run, or none
    claim = f"{counts['tests']} tests under {under}: failed, skipped, or not in time"
    stage.report.add({"configuration": "tests", "files": files, **counts}, verdict(claim, [failed], 0, at_most=True))


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
