"""One Prefect engine for all tests of the flows."""

from collections.abc import Iterator

import pytest

from flows import _environment


@pytest.fixture(scope="session")
def prefect_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A private Prefect server with a database of its own; about 10 s, once."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PREFECT_HOME", str(tmp_path_factory.mktemp("prefect")))
        _environment.set_defaults()
        from prefect.testing.utilities import prefect_test_harness

        with prefect_test_harness(server_startup_timeout=120):
            yield
