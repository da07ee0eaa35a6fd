"""The command: quick where nothing is computed, and one clear paragraph for every mistake."""

import errno
import pkgutil
import re
import socket
import subprocess
import sys
import typing
from pathlib import Path

import pytest

from conf.load import ConfigError
from flows import _errors, _parser, cli, deploy
from tests.tlt_core.rollout.vllm.environments import vllm_environment
from tlt_core.cluster.group import WorkerDied
from tlt_core.cluster.placement import RayNotStarted
from tlt_core.data.dataset import DataError


def _tlt(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "flows.cli", *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("arguments", "exit_code", "said"),
    [
        (["--help"], 0, "prepare"),
        (["train", "conf/smoke.yaml", "rollout.nun_samples=4"], 2, "did you mean 'num_samples'?"),
        (
            ["train", "conf/smoke.yaml", f"output_dir={'n' * 300}"],
            2,
            "nor written (File name too long); set output_dir",
        ),
    ],
)
def test_help_and_configuration_errors_are_short_and_clear(arguments: list[str], exit_code: int, said: str) -> None:
    done = _tlt(*arguments)
    assert done.returncode == exit_code
    assert said in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_the_command_line_imports_nothing_heavy() -> None:
    code = "import sys, flows.cli; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "prefect", "mlflow", "ray", "transformers", "rich", "numpy"} & set(done.stdout.split())


def test_without_the_folder_bench_only_its_command_is_missing(
    quiet_command: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "bench", None)
    assert cli.main(["bench", "step", "conf/smoke.yaml"]) == 2
    assert "benchmark step: the package bench is missing; take the folder" in capsys.readouterr().err
    assert cli.main(["train", "conf/smoke.yaml", "model={kind: pretrained, path: ./nowhere}"]) == 2


def test_settings_may_stand_behind_options() -> None:
    args = cli.parse(["bench", "step", "conf/smoke.yaml", "seed=1", "--repeats", "2", "name=x"])
    assert (args.config, args.overrides, args.repeats) == ("conf/smoke.yaml", ["seed=1", "name=x"], 2)
    args = cli.parse(["bench", "step", "seed=1", "name=x"])
    assert (args.config, args.overrides) == ("conf/demo.yaml", ["seed=1", "name=x"])


def test_unknown_arguments_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["train", "conf/smoke.yaml", "--resume"], ["ui", "a=1"], ["fly"]):
        with pytest.raises(SystemExit, match="2"):
            cli.parse(argv)
        assert argv[-1] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "remedy"),
    [
        ("--temperature", "nan", "'nan': give a number from 0 to 100"),
        ("--temperature", "warm", "'warm': give a number from 0 to 100"),
        ("--top-p", "0", "'0': give a number above 0 up to 1"),
        ("--max-new-tokens", "1.5", "'1.5': give a whole number from 1 to"),
        ("--seed", "1e9", "'1e9': give a whole number from 0 to"),
        ("--out", ".", "is a folder: name a file"),
        ("--out", "pyproject.toml/x", "pyproject.toml is a file; name a file in a folder"),
    ],
)
def test_options_out_of_range_are_refused(
    option: str, value: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"--prompts": "in.jsonl", "--out": "out.jsonl"} | {option: value}
    with pytest.raises(SystemExit) as ended:
        cli.parse(["generate", *(word for pair in given.items() for word in pair)])
    assert ended.value.code == 2
    assert remedy in capsys.readouterr().err


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("model={{kind: pretrained, path: ./nowhere}}", "model folder ./nowhere does not exist; give a local folder"),
        ("model={{kind: pretrained, path: {}/torn}}", "model.safetensors is damaged"),
        ("reward.functions=[{{kind: python, path: 'no_such_module:f'}}]", "'no_such_module:f' cannot be used"),
        ("output_dir={}/file", "file/smoke' can be neither made nor written (Not a directory); set output_dir to one"),
        ("cluster.num_workers=4096", "cluster.num_workers=4096: this machine has"),
        ("rollout.speculation.drafter_path={}", "is not a readable drafter folder"),
        ("data={{kind: file, train_path: {}/none.jsonl}}", "none.jsonl does not exist; data.train_path wants a"),
        ("tracking.uri=foo://bar", "MLflow knows no store of kind 'foo'"),
    ],
)
def test_what_a_run_would_find_late_is_refused_before_prefect_starts(
    quiet_command: None, tiny_folder: Path, tmp_path: Path, setting: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "config.json").write_text((tiny_folder / "config.json").read_text())
    (tmp_path / "torn" / "model.safetensors").write_bytes((tiny_folder / "model.safetensors").read_bytes()[:4000])
    given = [f"output_dir={tmp_path}/runs", "reward.functions=[{kind: exact}]", setting.format(tmp_path)]
    assert cli.main(["train", "conf/smoke.yaml", *given]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_pages_of_a_store_that_cannot_be(
    quiet_command: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deploy.os, "execve", lambda *_: pytest.fail("MLflow's server was started"))
    assert cli.main(["ui", "--uri", "https://me:geheim@host"]) == 2
    said = capsys.readouterr().err
    assert "MLFLOW_TRACKING_PASSWORD" in said
    assert "geheim" not in said


def test_a_port_in_use_names_another(quiet_command: None, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert cli.main(["ui", "--port", str(port)]) == 2
    said = capsys.readouterr().err
    assert f"port {port}" in said
    assert f"--port {port + 1}" in said


def test_the_server_listens_on_this_machine_only_and_keeps_files_beside_the_database(tmp_path: Path) -> None:
    assert _parser.parse(["ui"]).host == "127.0.0.1"
    command = deploy.server_command(uri=f"sqlite:///{tmp_path}/mlflow.db", host="127.0.0.1", port=5001)
    assert " ".join(command).endswith(f"--artifacts-destination {tmp_path}/mlartifacts --host 127.0.0.1 --port 5001")
    assert "--artifacts-destination" not in deploy.server_command(uri="postgresql://db/x", host="127.0.0.1", port=5001)


@pytest.mark.parametrize("benchmark", typing.get_args(_parser.Benchmark))
def test_each_benchmark_is_found(benchmark: _parser.Benchmark) -> None:
    assert callable(pkgutil.resolve_name(_parser.benchmark_function(benchmark)))


def test_failures_and_their_exit_codes(tmp_path: Path) -> None:
    cases = [
        (ConfigError("Override 'x' is not of the form ..."), 2, "Override 'x'"),
        (DataError("train.jsonl, line 3: not JSON"), 2, "line 3"),
        (WorkerDied("A worker failed with: ..."), 1, "A worker failed"),
        (WorkerDied("AcceleratorError: CUDA error: device-side assert triggered"), 1, "lower the learning rate"),
        (RayNotStarted("Ray did not start"), 1, "Ray did not start"),
        (OSError(errno.ENOSPC, "No space left on device"), 1, "The disk is full"),
        (WorkerDied("SafetensorError: I/O error: No space left on device (os error 28)"), 1, "The disk is full"),
        (OSError(errno.EROFS, "Read-only file system", "runs/x"), 1, "The disk is read-only"),
        (WorkerDied("SafetensorError: I/O error: Read-only file system (os error 30)"), 1, "The disk is read-only"),
        (OSError(errno.EMFILE, "Too many open files"), 1, "ulimit -n"),
        (WorkerDied("A worker failed with:\n  File x\nRuntimeError: Cannot allocate memory"), 1, "is short (Runtime"),
        (WorkerDied("OutOfMemoryError: CUDA out of memory. Tried to allocate 9 GiB"), 1, "max_live_requests"),
        (PermissionError(errno.EACCES, "Permission denied", "runs"), 1, "set output_dir"),
        (KeyboardInterrupt(), 130, "goes on from the newest checkpoint"),
    ]
    for error, exit_code, said in cases:
        text, code = _errors.explain(error, run_dir=tmp_path) or ("a traceback", 0)
        assert code == exit_code
        assert said in text
    (tmp_path / "log.txt").write_text("")
    text, _ = _errors.explain(WorkerDied("gone"), run_dir=tmp_path) or ("a traceback", 0)
    assert str(tmp_path / "log.txt") in text


def test_our_own_mistakes_keep_their_traceback(tmp_path: Path) -> None:
    for error in (AssertionError("batch.py forgot a share"), KeyError("x"), ValueError("of numpy"), OSError("odd")):
        assert _errors.explain(error, run_dir=tmp_path) is None


def test_doctor_prints_its_table_with_vllm_of_its_own_environment(
    quiet_command: None, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PYTHON", str(tmp_path / "bin/python"))
    monkeypatch.setenv("COLUMNS", "400")
    assert cli.main(["doctor"]) == 0
    assert re.search(r"ray\s+\d.*used", capsys.readouterr().out)
    assert cli.main(["doctor", "conf/gpu_32b.yaml"]) == 0
    assert re.search(r"vllm\s+not installed\s+missing", capsys.readouterr().out)
    vllm_environment(tmp_path, "vllm", "0.32.0")
    assert cli.main(["doctor", "conf/multi_gpu.yaml"]) == 0
    said = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "vllm 0.32.0 for cuda used" in said
    assert "rollout engine vllm used workers have GPUs, and vLLM is installed" in said


def test_an_option_of_another_benchmark_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "step", "conf/smoke.yaml", "--workload", "tail"]) != 0
    assert "--workload=tail: only 'tlt bench rollout' and 'tlt bench e2e' take it" in capsys.readouterr().err
