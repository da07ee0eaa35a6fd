"""`tests/gpu_suite.py`: what it claims of stages that crash, hang or flood; the whole sequence on a CPU, and on a
machine that has torch, Triton, transformers and pytest, and none of our other packages."""

import json
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from unittest import mock

import pytest
import torch

from bench.sizes import measure, planted
from tests import gpu_runs, gpu_stages, gpu_suite
from tests.gpu_report import Report, Stage
from tests.pretended_gpu import pretended_gpu

ROOT = gpu_suite.ROOT
SCRIPT = ROOT / "tests/gpu_suite.py"
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
# Stages that go wrong, and what a runner that has them is called with.
PROBES = """
import os, pathlib, subprocess, sys, time
sys.path[:0] = [{root!r}, {here!r}]
from tests import gpu_suite
from tests.gpu_suite import Part

def crash(stage):
    stage.report.add({{"says": "known before it"}})
    raise SystemError("the device is gone")

def kill(stage):
    os.kill(os.getpid(), 9)

def hang(stage):
    stage.report.add({{"says": "known before it"}})
    for options in ({{}}, {{"start_new_session": True}}):
        child = subprocess.Popen(["sleep", "600"], **options)
        (stage.folder / f"{{child.pid}}.txt").write_text("")
    print("about to wait")
    time.sleep(600)

def flood(stage):
    print("the first line")
    for _ in range(400):
        print("x" * 65536)
    print("the last line")

gpu_suite.PARTS = (
    Part("a", "crash", 60, "probes:crash"), Part("b", "kill", 60, "probes:kill"),
    Part("c", "flood", 60, "probes:flood"),
    Part("d", "missing", 60, "probes:flood", ("no_such_package",)), Part("e", "hang", 60, "probes:hang"),
)
if __name__ == "__main__":
    sys.exit(gpu_suite.main())
"""


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """Environment of a bare machine."""
    folder = tmp_path / "bare"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(BARE.format(names=ABSENT))
    return {**os.environ, "PYTHONPATH": str(folder)}


@pytest.fixture
def suite(tmp_path: Path):
    """Runs the suite; its reports lie in out, all else in work."""

    def run(*arguments: str, script: Path = SCRIPT, **options) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, script, "--out", tmp_path / "out", "--work", tmp_path / "work", *arguments]
        return subprocess.run(command, capture_output=True, text=True, **options)

    return run


@pytest.fixture
def probes(tmp_path: Path, suite):
    """The suite with stages that go wrong."""
    script = tmp_path / "probes.py"
    script.write_text(PROBES.format(root=str(ROOT), here=str(tmp_path)))
    return lambda *arguments: suite("--device", "cpu", *arguments, script=script)


def test_a_crash_stops_nothing_and_all_is_kept(tmp_path: Path, probes) -> None:
    done = probes("--only", "a,b,c,d")
    assert done.returncode == 1
    reports = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "out").glob("*.json")}
    assert {name: report["outcome"] for name, report in reports.items()} == {
        "crash": "failed (1)",
        "kill": "failed (-9)",
        "flood": "done",
        "missing": "left out: no_such_package: not installed",
    }
    assert reports["crash"]["rows"] == [{"says": "known before it"}]
    assert (tmp_path / "work/flood.log").stat().st_size < 2.2 * 2**20
    assert "SystemError: the device is gone" in done.stdout
    with tarfile.open(tmp_path / "out/logs.tar.gz") as archive:
        assert {"crash.json", "crash.log", "flood.log", "missing.json", "summary.txt"} <= set(archive.getnames())


def test_a_stage_that_hangs_is_ended_with_all_its_children(tmp_path: Path, probes) -> None:
    done = probes("--only", "hang", "--seconds", "20")
    assert done.returncode == 1
    report = json.loads((tmp_path / "out/hang.json").read_text())
    assert report["outcome"] == "out of time (20 s)"
    assert report["rows"] == [{"says": "known before it"}]
    children = [int(path.stem) for path in (tmp_path / "work/hang").glob("*.txt")]
    assert len(children) == 2
    assert not any(_runs(child) for child in children)


def _runs(pid: int) -> bool:
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_every_stage_runs_or_is_left_out_on_a_bare_machine(tmp_path: Path, bare: dict[str, str], suite) -> None:
    done = suite("--device", "cpu", "--seconds", "1500", env=bare)
    assert done.returncode == 0, done.stdout + done.stderr
    reports = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "out").glob("*.json")}
    outcomes = {name: report["outcome"] for name, report in reports.items()}
    missing = "left out: pydantic, prefect, mlflow, ray, reasoning_gym: not installed"
    assert outcomes == dict.fromkeys(("train", "steps", "shared"), missing) | dict.fromkeys(
        ("kernels", "rounds", "decoding", "large"), "done"
    )
    configurations = [{row.get("configuration") for row in reports[name]["rows"]} for name in ("kernels", "decoding")]
    assert configurations[0] >= {"tests", "ceilings", "tree_attention", "distill_loss"}
    assert configurations[1] >= {"setting", "plain", "adaptive", "transformers"}
    must_hold = ("no near-ties", "waits a round", "tokens are plain decoding's", "failed, skipped")
    held = [v["holds"] for r in reports.values() for v in r["verdicts"] if any(s in v["claim"] for s in must_hold)]
    assert len(held) == 13
    assert all(held), done.stdout


@pytest.mark.slow
@pytest.mark.long
def test_whole_runs(tmp_path: Path, suite) -> None:
    """The stages that need all packages."""
    done = suite("--device", "cpu", "--seconds", "2000", "--only", "d,e,f")
    assert done.returncode == 0, done.stdout + done.stderr
    reports = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "out").glob("*.json")}
    train, steps = reports["train"], reports["steps"]
    assert [v["holds"] for v in train["verdicts"]] == [True] * len(gpu_runs.judged([0, 0], {}))
    assert [row["step"] for row in train["rows"] if "step" in row] == [1, 2, 3]
    assert [v["claim"] for v in steps["verdicts"]] == ["step time, plain over TLT"]
    assert {row["configuration"] for row in steps["rows"] if "configuration" in row} == {"plain", "tlt", "responses"}
    checksums = [row["steps"][0]["rollout/checksum"] for row in steps["rows"] if "steps" in row]
    assert checksums[0] == checksums[1]
    assert reports["shared"]["outcome"].startswith(("done", "left out"))


def _made_on_cpu(make):
    return lambda *sizes, dtype, device, **options: make(*sizes, dtype=dtype, device="cpu", **options).to(device)


@pytest.mark.parametrize("stage", ["rounds", "decoding", "large"])
def test_stages_mix_no_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    """As on a GPU, with a tiny model in place of real ones."""
    for name in (gpu_stages._SMOLLM2, "qwen2.5-7b"):
        monkeypatch.setitem(planted.SHAPES, name, planted.SHAPES["tiny"])
    tiny = measure.Sizes((1, 2), 12, 8, 128)
    for name, value in (("_TOKENS", {"cuda": 6}), ("_WATCHED", 2), ("_SMOL", tiny), ("_LARGE", tiny)):
        monkeypatch.setattr(gpu_stages, name, value)
    for name in ("planted_target", "random_drafter"):  # a generator of random numbers cannot be pretended
        monkeypatch.setattr(planted, name, _made_on_cpu(getattr(planted, name)))
    monkeypatch.setattr(gpu_stages, "run_tests", lambda *_: None)
    monkeypatch.setattr(gpu_stages, "_peer", lambda *_: None)
    monkeypatch.setattr(measure, "QWEN_7B", measure.SMALL)
    monkeypatch.setattr(measure.launches, "smallest_s", lambda _: 1e-6)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda _: None)
    monkeypatch.setenv("TLT_HOME", str(tmp_path))
    report = Report(tmp_path / f"{stage}.json", command="by hand")
    monkeypatch.setattr(gpu_stages, "planned_owners", lambda _: {"all": 1 << 33})  # a pretended GPU has no meta tensors
    with pretended_gpu(), mock.patch.object(torch.cuda, "mem_get_info", return_value=(1 << 33, 1 << 34)):
        getattr(gpu_stages, stage)(Stage(report, "cuda", tmp_path, time.monotonic() + 60))
    must_hold = ("no near-ties", "waits a round", "tokens are plain decoding's")
    held = [v["holds"] for v in report.content["verdicts"] if any(claim in v["claim"] for claim in must_hold)]
    assert len(held) == {"rounds": 9, "decoding": 2, "large": 2}[stage]
    assert all(held), report.content["verdicts"]
