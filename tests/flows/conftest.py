"""What tests of flows begin with."""

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def folder(prefect_engine: None, embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for a module's runs, which make data and cold start anew: TLT_HOME is in it, with the model alone."""
    folder = tmp_path_factory.mktemp("flows")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TLT_HOME", str(folder / "artifacts"))
        (folder / "artifacts" / "models").mkdir(parents=True)
        (folder / "artifacts" / "models" / embedded_model.name).symlink_to(embedded_model)
        yield folder
