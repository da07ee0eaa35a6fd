"""`tests/gpu_suite.py` on a machine that has torch, Triton, transformers and pytest, and none of our other packages."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import gpu_suite

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
    assert {name: part["outcome"] for name, part in summary["parts"].items()} == dict.fromkeys(
        ("tests", "kernels", "sizes-tiny"), "done"
    )
    tests = json.loads((out / "tests.json").read_text())
    assert tests["tests"] > 100
    assert tests["failures"] == tests["errors"] == 0
    for name in ("kernels", "sizes-tiny"):
        report = json.loads((out / f"{name}.json").read_text())
        assert {"name", "commit", "command", "machine", "repeats", "rows", "verdicts"} == report.keys()
        assert report["rows"]
    assert "tokens are plain decoding's" in done.stdout


def test_what_no_time_is_left_for_is_not_started(tmp_path: Path) -> None:
    command = [sys.executable, SCRIPT, tmp_path, "--device", "cpu", "--seconds", "0"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert {part["outcome"] for part in summary["parts"].values()} == {"no time left"}


def test_a_part_alone_is_added_to_the_summary(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(json.dumps({"parts": {"kernels": {"outcome": "done", "seconds": 1.0}}}))
    command = [sys.executable, SCRIPT, tmp_path, "--device", "cpu", "--seconds", "0", "--only"]
    subprocess.run([*command, "tests"], capture_output=True, text=True)
    outcomes = {n: p["outcome"] for n, p in json.loads((tmp_path / "summary.json").read_text())["parts"].items()}
    assert outcomes == {"kernels": "done", "tests": "no time left"}
    done = subprocess.run([*command, "test"], capture_output=True, text=True)
    assert (done.returncode, "choose from tests, kernels, sizes-tiny" in done.stderr) == (2, True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_named(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, SCRIPT, tmp_path], capture_output=True, text=True)
    assert done.returncode == 2
    assert "torch sees no GPU here" in done.stderr


def test_files_are_those_with_tests_for_a_gpu() -> None:
    files = gpu_suite.gpu_test_files()
    assert {"tests/kernels/tree/test_tree_attention.py", "tests/tlt_core/rollout/test_graph_replay.py"} <= set(files)
    assert "tests/tlt_core/rollout/test_edges.py" not in files
