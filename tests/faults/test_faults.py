"""What breaks, where, and what comes of it: the run goes on, or ends with one message and resumes to the bit.

Real processes: `make test-faults` runs all cases, writes reports/faults/matrix.json, and docs/faults.md from it.
Each case is a test of its own, and any selection of them can run alone (`-k`).
"""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.faults import cases, table
from tests.faults.cases import Case
from tests.faults.rewards import MISDEEDS
from tests.faults.storm import Storm

pytestmark = [pytest.mark.faults, pytest.mark.prefect]
CASES = cases.drawn()


@pytest.fixture(scope="module")
def storm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Storm]:
    owner = Storm(tmp_path_factory.mktemp("faults"))
    try:
        owner.begin()
        yield owner
    finally:
        owner.close()


def test_the_matrix_is_large_enough() -> None:
    assert len(CASES) + len(MISDEEDS) >= 60
    met = {case.phase for case in CASES}
    assert met == {*cases.PHASES, cases.BETWEEN}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.fault}-{case.phase}")
def test_a_fault_in_a_phase(storm: Storm, book: list[dict[str, Any]], case: Case) -> None:
    with table.noted(book, case.fault, case.phase) as row:
        try:
            storm.hit(case, row)
        except BaseException:
            storm.run.kill()
            raise


def test_everything_that_ended_a_run_was_without_effect(storm: Storm) -> None:
    """The last restarts resume, too."""
    storm.settle()
    storm.finish()
