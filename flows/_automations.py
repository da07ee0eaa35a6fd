"""What Prefect's server does by itself for the runs of our deployments, which all have the tag `tlt`; `tlt recover`.

    no heartbeat for 90 s            -> Crashed       the process, its worker or its machine was killed
    Crashed for 60 s                 -> AwaitingRetry the same run again; it resumes from its newest checkpoint
    running longer than its tag says -> Cancelling    tags limit-2h, limit-12h, limit-48h
    Failed, TimedOut, Crashed        -> a message     if TLT_NOTIFY_URL names a webhook
    acceptance has dropped           -> a message     likewise; prefect.yaml starts the retraining

Why 60 s: a worker reports a dead process twice, the second time after it has imported the flow to look for hooks.  A
retry before the second report would become Crashed, too, and would be started twice.  `_config.py` ends a run that
crashes again and again.
"""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any
from uuid import UUID

import psutil
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter, WorkPoolFilter, WorkPoolFilterName
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.events.actions import CancelFlowRun, ChangeFlowRunState, SendNotification
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.states import AwaitingRetry, Crashed

HEARTBEAT_S = 30  # between heartbeats of flow processes; Prefect's minimum
SILENCE = timedelta(seconds=90)  # three heartbeats
SETTLED = timedelta(seconds=60)
LIMITS = {f"limit-{hours}h": timedelta(hours=hours) for hours in (2, 12, 48)}

DROPPED = "tlt.drafter.acceptance-dropped"  # event of flows/retrain.py

_RUNS = {"prefect.resource.id": ["prefect.flow-run.*"]}
_END = {f"prefect.flow-run.{state}" for state in ("Completed", "Failed", "TimedOut", "Cancelled", "Crashed")}


def install(client: SyncPrefectClient, *, notify_url: str, limits: Mapping[str, timedelta] = LIMITS) -> list[str]:
    """Create or replace the automations; returns their names."""
    automations = [
        *_of_crashes(),
        *(
            AutomationCore(
                name=f"tlt: cancel runs after their {tag}",
                trigger=_absent(after={"prefect.flow-run.Running"}, expect=_END, within=most, tag=tag),
                actions=[CancelFlowRun()],
            )
            for tag, most in limits.items()
        ),
    ]
    if notify_url:
        said, name = {"text": "{{subject}}\n{{body}}"}, "tlt-webhook"
        block = CustomWebhookNotificationBlock(name=name, url=notify_url, json_data=said, allow_private_urls=True)
        automations += _messages(UUID(str(block.save(name, overwrite=True))))
    for automation in automations:
        for existing in client.read_automations_by_name(automation.name):
            client.delete_automation(existing.id)
        client.create_automation(automation)
    return [automation.name for automation in automations]


def recover(client: SyncPrefectClient, *, pool: str) -> list[str]:
    """Schedule the pool's runs again that are alive to Prefect although their process is gone; returns a line for each.

    The server notices after 90 s.  Here it is seen at once, since workers of type process record the pid of each run.
    A worker that died alone leaves its flow process running, which is not touched.  No worker of the pool may be
    running: it might have taken a run without having recorded the pid yet.
    """
    recovered = []
    for run in client.read_flow_runs(
        flow_run_filter=FlowRunFilter.model_validate(
            {"state": {"type": {"any_": ["PENDING", "RUNNING", "CANCELLING"]}}}
        ),
        work_pool_filter=WorkPoolFilter(name=WorkPoolFilterName(any_=[pool])),
        limit=200,
    ):
        if run.parent_task_run_id is None and not _is_alive(run):  # subflows end with their parent
            assert run.state is not None
            client.set_flow_run_state(run.id, Crashed(message="its process is gone"), force=True)
            client.set_flow_run_state(run.id, AwaitingRetry(message="resumes from its checkpoint"))
            state = run.state.name or run.state.type.value
            recovered.append(f"{run.name} ({run.id}) was {state} without a process; it is scheduled again")
    return recovered


def _is_alive(run: FlowRun) -> bool:
    """Whether the process with the recorded pid exists and belongs to this run."""
    try:
        process = psutil.Process(int(run.infrastructure_pid or ""))
        is_ours = process.environ().get("PREFECT__FLOW_RUN_ID") == str(run.id)
        return is_ours and process.status() != psutil.STATUS_ZOMBIE
    except (ValueError, psutil.NoSuchProcess, psutil.AccessDenied):  # AccessDenied: another user's, so not ours
        return False


def _of_crashes() -> list[AutomationCore]:
    """Without the first, a run whose process was killed together with its worker would stay Running for ever."""
    heartbeat = "prefect.flow-run.heartbeat"
    gone_on = {f"prefect.flow-run.{state}" for state in ("Scheduled", "AwaitingRetry", "Pending", "Running")}
    resumed = {"state": StateType.SCHEDULED, "name": "AwaitingRetry", "message": "crashed; resumes from its checkpoint"}
    return [
        AutomationCore(
            name="tlt: crash runs without a heartbeat",
            trigger=_absent(after={heartbeat}, expect={heartbeat, *_END}, within=SILENCE, tag="tlt"),
            actions=[ChangeFlowRunState(state=StateType.CRASHED, message=f"no heartbeat for {SILENCE.seconds} s")],
        ),
        AutomationCore(
            name="tlt: resume crashed runs",
            trigger=_absent(after={"prefect.flow-run.Crashed"}, expect=gone_on, within=SETTLED, tag="tlt"),
            actions=[ChangeFlowRunState.model_validate(resumed)],
        ),
    ]


def _messages(block_id: UUID) -> list[AutomationCore]:
    """Of failed runs, and of a drop of acceptance; each at once."""
    at_once: dict[str, Any] = {"posture": Posture.Reactive, "threshold": 1, "within": timedelta(0)}
    failed = {f"prefect.flow-run.{state}" for state in ("Failed", "TimedOut", "Crashed")}
    of_runs: dict[str, Any] = {"match": _RUNS, "match_related": _tagged("tlt"), "for_each": {"prefect.resource.id"}}
    return [
        AutomationCore(
            name="tlt: report failed runs",
            trigger=EventTrigger(expect=failed, **of_runs, **at_once),
            actions=[
                SendNotification(
                    block_document_id=block_id,
                    subject="TLT: {{ flow.name }}/{{ flow_run.name }} is {{ flow_run.state.name }}",
                    body="{{ flow_run.state.message }}\n{{ flow_run|ui_url }}",
                )
            ],
        ),
        AutomationCore(
            name="tlt: report a drop of acceptance",
            trigger=EventTrigger(expect={DROPPED}, match={"prefect.resource.id": "tlt.drafter.*"}, **at_once),
            actions=[
                SendNotification(
                    block_document_id=block_id,
                    subject="TLT: the acceptance of {{ event.resource.name }} has dropped",
                    body="{{ event.payload.message }}",
                )
            ],
        ),
    ]


def _absent(*, after: set[str], expect: set[str], within: timedelta, tag: str) -> EventTrigger:
    """Fires for a run with the tag when none of `expect` follows one of `after` in time."""
    return EventTrigger(
        after=after,
        expect=expect,
        match=_RUNS,
        match_related=_tagged(tag),
        for_each={"prefect.resource.id"},
        posture=Posture.Proactive,
        threshold=1,
        within=within,
    )


def _tagged(tag: str) -> dict[str, Any]:
    return {"prefect.resource.role": "tag", "prefect.resource.id": f"prefect.tag.{tag}"}
