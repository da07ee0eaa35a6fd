"""What the two files of faults share."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults import table


@pytest.fixture(scope="module")
def book() -> Iterator[list[dict[str, Any]]]:
    """What came of each case; written at the end where FAULTS_REPORT says."""
    rows: list[dict[str, Any]] = []
    yield rows
    if path := os.environ.get("FAULTS_REPORT"):
        table.write(Path(path), rows)
