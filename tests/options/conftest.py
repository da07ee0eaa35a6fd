"""Model, drafter and rows of runs in two small steps."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.options import runs


@pytest.fixture(scope="module")
def parts(embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[runs.Parts]:
    root = tmp_path_factory.mktemp("options")
    (root / "artifacts" / "models").mkdir(parents=True)
    (root / "artifacts" / "models" / embedded_model.name).symlink_to(embedded_model)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TLT_HOME", str(root / "artifacts"))
        yield runs.make_parts(root)
