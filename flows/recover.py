"""`tlt recover`: restart runs that Prefect believes to be alive although their process is gone.

When a flow process and its worker die together (machine lost, kill -9 of both), the run stays Running and keeps its
concurrency slot.  The server notices after 90 s without a heartbeat (`_automations.py`).  Here it is seen at once,
because workers of type process record the pid of each run.  Such a run becomes Crashed and is scheduled again; it
resumes from its newest checkpoint.

A worker that died alone leaves its flow process running.  That run ends by itself and is not touched.
"""

import logging
from collections.abc import Iterator
from typing import NamedTuple
from uuid import UUID

import psutil
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter, WorkPoolFilter, WorkPoolFilterName
from prefect.client.schemas.objects import FlowRun
from prefect.states import AwaitingRetry, Crashed

log = logging.getLogger(__name__)

_STARTED = ("PENDING", "RUNNING", "CANCELLING")
_RUN_ID = "PREFECT__FLOW_RUN_ID"  # in the environment of every flow process
_PAGE = 200


class Recovered(NamedTuple):
    """A run that was found without a process."""

    run_id: UUID
    name: str
    state: str


def recover(client: SyncPrefectClient, *, pool: str) -> list[Recovered]:
    """Schedule the pool's runs that have no process again; returns them.

    No worker of the pool may be running: it might have taken a run without having recorded the pid yet.
    """
    recovered = []
    for run in _started_runs(client, pool):
        if not _is_alive(run):
            assert run.state is not None
            client.set_flow_run_state(run.id, Crashed(message="its process is gone"), force=True)
            client.set_flow_run_state(run.id, AwaitingRetry(message="resumes from its checkpoint"))
            recovered.append(Recovered(run.id, run.name, run.state.name or run.state.type.value))
            log.warning(
                "run %s (%s) was %s without a process; it is scheduled again", run.name, run.id, recovered[-1].state
            )
    return recovered


def _started_runs(client: SyncPrefectClient, pool: str) -> Iterator[FlowRun]:
    runs = client.read_flow_runs(
        flow_run_filter=FlowRunFilter.model_validate({"state": {"type": {"any_": list(_STARTED)}}}),
        work_pool_filter=WorkPoolFilter(name=WorkPoolFilterName(any_=[pool])),
        limit=_PAGE,
    )
    return (run for run in runs if run.parent_task_run_id is None)  # subflows end with their parent


def _is_alive(run: FlowRun) -> bool:
    """Whether the process with the recorded pid exists and belongs to this run."""
    try:
        process = psutil.Process(int(run.infrastructure_pid or ""))
        return process.environ().get(_RUN_ID) == str(run.id) and process.status() != psutil.STATUS_ZOMBIE
    except (ValueError, psutil.NoSuchProcess, psutil.AccessDenied):  # AccessDenied: another user's, so not ours
        return False
