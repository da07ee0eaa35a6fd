"""Random cases: some in every run of the tests, thousands in the long ones.  The same cases every time."""

import pytest
from hypothesis import HealthCheck, settings


def cases(*, few: int, many: int) -> pytest.MarkDecorator:
    """Runs a test with the argument `count`, for `fuzz`."""
    return pytest.mark.parametrize("count", [few, pytest.param(many, marks=[pytest.mark.slow, pytest.mark.long])])


def fuzz(count: int, **others: int) -> settings:
    """So many cases, with no limit on the time of one: a busy machine is slow now and then."""
    slow = [HealthCheck.too_slow]
    return settings(
        max_examples=count, deadline=None, derandomize=True, database=None, suppress_health_check=slow, **others
    )
