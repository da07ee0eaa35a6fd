"""`tests/gpu_suite.py` on a machine that has torch, Triton, transformers and pytest, and none of our other packages."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import gpu_runs, gpu_suite

SCRIPT = Path(gpu_suite.__file__)
# Python imports this file at its start: it hides packages, as if they were not installed.
BARE = """
import sys
from importlib.machinery import PathFinder
HIDDEN = {names!r}
class Bare:
    find_distributions = PathFinder.find_distributions
    @staticmethod
    def find_spec(name, path=None, target=None):
        return None if name.split(".")[0] in HIDDEN else PathFinder.find_spec(name, path, target)
sys.meta_path[:] = [Bare if finder is PathFinder else finder for finder in sys.meta_path]
"""
ABSENT = {
    "pydantic", "prefect", "ray", "mlflow", "deepspeed", "dvc", "rich", "reasoning_gym", "psutil", "peft", "pebble",
    "hypothesis", "accelerate", "math_verify", "pyarrow", "matplotlib", "fastapi", "gguf",
}  # fmt: skip


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """Environment of a bare machine."""
    folder = tmp_path / "bare"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(BARE.format(names=ABSENT))
    return {**os.environ, "PYTHONPATH": str(folder)}


def test_the_machine_is_bare(bare: dict[str, str]) -> None:
    done = subprocess.run([sys.executable, "-c", "import torch, pydantic"], env=bare, capture_output=True, text=True)
    assert "No module named 'pydantic'" in done.stderr


@pytest.mark.slow
def test_every_part_runs(bare: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, SCRIPT, out, "--device", "cpu", "--repeats", "1", "--seconds", "900"]
    done = subprocess.run(command, env=bare, capture_output=True, text=True)
    logs = "\n".join(f"{path.name}: {path.read_text()[-1500:]}" for path in sorted(out.glob("*.log")))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    summary = json.loads((out / "summary.json").read_text())
    outcomes = {name: part["outcome"] for name, part in summary["parts"].items()}
    assert {outcomes.pop(name) for name in gpu_runs.RUNS} == {"left out: pydantic is not installed"}
    assert outcomes == dict.fromkeys(("tests", "kernels", "sizes-tiny"), "done")
    tests = json.loads((out / "tests.json").read_text())
    assert tests["tests"] > 100
    assert tests["failures"] == tests["errors"] == 0
    for name in ("kernels", "sizes-tiny"):
        report = json.loads((out / f"{name}.json").read_text())
        assert {"name", "commit", "command", "machine", "repeats", "rows", "verdicts"} == report.keys()
        assert report["rows"]
    assert "tokens are plain decoding's" in done.stdout


@pytest.mark.slow
def test_a_run_trains_and_goes_on(tmp_path: Path) -> None:
    """The part that a GPU comes first to, on a CPU."""
    command = [sys.executable, SCRIPT, tmp_path, "--device", "cpu", "--seconds", "900", "--only", "run-own"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr + (tmp_path / "run-own.log").read_text()[-1500:]
    assert done.stdout.count("holds: run-own: ") == len(gpu_runs.judged([0, 0], {}))
    rows = json.loads((tmp_path / "run-own.json").read_text())["rows"]
    assert [row["step"] for row in rows[2:]] == [1, 2, 3]


GOOD = {
    "actor/grad_norm": 0.5,
    "training/rollout_probs_diff_mean": 0.01,
    "training/resume_attempt": 1.0,
    "drafter/optimizer_steps_total": 4.0,
    "training/policy_version": 3.0,
}


def _failing(codes: list[int], metrics: dict[int, dict[str, float]]) -> int:
    return sum(not verdict["holds"] for verdict in gpu_runs.judged(codes, metrics))


@pytest.mark.parametrize(
    ("codes", "wrong"),
    [
        ([0, 1], {}),
        ([-9, 0], {}),
        ([0, 0], {"actor/grad_norm": math.nan}),
        ([0, 0], {"actor/grad_norm": 0.0}),
        ([0, 0], {"training/rollout_probs_diff_mean": 0.2}),
        ([0, 0], {"training/rollout_probs_diff_mean": math.nan}),
        ([0, 0], {"training/resume_attempt": 0.0}),
        ([0, 0], {"drafter/optimizer_steps_total": 0.0}),
        ([0, 0], {"training/policy_version": 2.0}),
    ],
)
def test_each_failure_of_a_run_is_seen(codes: list[int], wrong: dict[str, float]) -> None:
    assert _failing([0, 0], dict.fromkeys((1, 2, 3), GOOD)) == 0
    assert _failing(codes, dict.fromkeys((1, 2, 3), GOOD | wrong)) == 1
    assert _failing([0, 0], {1: GOOD, 2: GOOD}) >= 2, "the third step is missing"


def test_a_part_is_ended_after_its_time_and_what_is_missing_is_named(tmp_path: Path, bare: dict[str, str]) -> None:
    command = [sys.executable, SCRIPT, tmp_path, "--device", "cpu", "--seconds", "0"]
    done = subprocess.run(command, env=bare, capture_output=True, text=True)
    assert done.returncode == 1
    summary = json.loads((tmp_path / "summary.json").read_text())
    outcomes = {part["outcome"] for part in summary["parts"].values()}
    assert outcomes == {"out of time", "left out: pydantic is not installed"}


def test_a_part_alone_is_added_to_the_summary(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(json.dumps({"parts": {"kernels": {"outcome": "done", "seconds": 1.0}}}))
    command = [sys.executable, SCRIPT, tmp_path, "--device", "cpu", "--seconds", "0", "--only"]
    subprocess.run([*command, "tests"], capture_output=True, text=True)
    outcomes = {n: p["outcome"] for n, p in json.loads((tmp_path / "summary.json").read_text())["parts"].items()}
    assert outcomes == {"kernels": "done", "tests": "out of time"}
    done = subprocess.run([*command, "test"], capture_output=True, text=True)
    assert (done.returncode, "tests, kernels, sizes-tiny" in done.stderr) == (2, True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_named(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, SCRIPT, tmp_path], capture_output=True, text=True)
    assert done.returncode == 2
    assert "torch sees no GPU here" in done.stderr


def test_files_are_those_with_tests_for_a_gpu() -> None:
    files = gpu_suite.gpu_test_files()
    assert {"tests/kernels/tree/test_tree_attention.py", "tests/tlt_core/rollout/test_graph_replay.py"} <= set(files)
    assert "tests/tlt_core/rollout/test_edges.py" not in files
