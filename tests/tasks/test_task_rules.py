"""Every task is a station: small, named by its step, never cached; retried only where repeating does nothing twice."""

import importlib
import inspect
import pkgutil

import prefect
import pytest
from prefect.cache_policies import NO_CACHE

import tasks

_LONGEST = 25  # lines


MODULES = [importlib.import_module(f"tasks.{m.name}") for m in pkgutil.iter_modules(tasks.__path__)]
STATIONS = {id(v): v for module in MODULES for v in vars(module).values() if isinstance(v, prefect.Task)}.values()


@pytest.mark.parametrize("station", STATIONS, ids=lambda t: t.name)
def test_a_task_is_a_station(station: prefect.Task) -> None:
    assert station.cache_policy == NO_CACHE, "a cached task with an effect is skipped the second time"
    is_registry_call = station.task_run_name in ("fetch-champion", "find-version", "record-decision")  # may be repeated
    assert station.retries == 0 or is_registry_call, "a retry is a restart of the run from its checkpoint"
    assert not station.persist_result
    assert len(inspect.getsource(station.fn).splitlines()) <= _LONGEST
