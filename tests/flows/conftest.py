"""What the tests of flows share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from flows import cli


@pytest.fixture(scope="module")
def runs_home(prefect_engine: None, embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folder of the module's runs: its `artifacts` are $TLT_HOME, with the embedded model.  Prefect's engine runs."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "artifacts" / "models").mkdir(parents=True)
    (folder / "artifacts" / "models" / embedded_model.name).symlink_to(embedded_model)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TLT_HOME", str(folder / "artifacts"))
        yield folder


@pytest.fixture
def quiet_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """`cli.main` in this process changes neither its logging nor its environment."""
    monkeypatch.setattr(cli._logging, "attach_terminal", lambda: None)
    monkeypatch.setattr(cli._environment, "set_defaults", lambda: None)
