"""What Prefect's server does by itself for the runs of our deployments, which all have the tag `tlt`.

    no heartbeat for 90 s            -> Crashed       the process, its worker or its machine was killed
    Crashed for 60 s                 -> AwaitingRetry the same run again; it resumes from its newest checkpoint
    running longer than its tag says -> Cancelling    tags limit-2h, limit-12h, limit-48h
    Failed, TimedOut, Crashed        -> a message     if TLT_NOTIFY_URL names a webhook
    acceptance has dropped           -> a message     likewise; prefect.yaml starts the retraining

Why 60 s: a worker reports a dead process twice, the second time after it has imported the flow to look for hooks.  A
retry before the second report would become Crashed, too, and would be started twice.  (Even then the second process
waits for the run's lock.)  `_config.py` ends a run that crashes again and again.
"""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any
from uuid import UUID

from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import StateType
from prefect.events.actions import CancelFlowRun, ChangeFlowRunState, SendNotification
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture

HEARTBEAT_S = 30  # between heartbeats of flow processes; Prefect's minimum
SILENCE = timedelta(seconds=90)  # three heartbeats
SETTLED = timedelta(seconds=60)
LIMITS = {f"limit-{hours}h": timedelta(hours=hours) for hours in (2, 12, 48)}

DROPPED = "tlt.drafter.acceptance-dropped"  # event of flows/check_drafter.py

_RUNS = {"prefect.resource.id": ["prefect.flow-run.*"]}
_END = {f"prefect.flow-run.{state}" for state in ("Completed", "Failed", "TimedOut", "Cancelled", "Crashed")}


def install(client: SyncPrefectClient, *, notify_url: str, limits: Mapping[str, timedelta] = LIMITS) -> list[str]:
    """Create or replace the automations; returns their names."""
    automations = [_crash_zombies(), _resume_crashed(), *(_cancel_overdue(tag, most) for tag, most in limits.items())]
    if notify_url:
        block_id = _webhook(notify_url)
        automations += [_report_failed(block_id), _report_drop(block_id)]
    for automation in automations:
        for existing in client.read_automations_by_name(automation.name):
            client.delete_automation(existing.id)
        client.create_automation(automation)
    return [automation.name for automation in automations]


def _crash_zombies() -> AutomationCore:
    """Otherwise a run whose process was killed together with its worker would stay Running for ever."""
    heartbeat = "prefect.flow-run.heartbeat"
    return AutomationCore(
        name="tlt: crash runs without a heartbeat",
        trigger=_absent(after={heartbeat}, expect={heartbeat, *_END}, within=SILENCE, tag="tlt"),
        actions=[ChangeFlowRunState(state=StateType.CRASHED, message=f"no heartbeat for {SILENCE.seconds} s")],
    )


def _resume_crashed() -> AutomationCore:
    gone_on = {f"prefect.flow-run.{state}" for state in ("Scheduled", "AwaitingRetry", "Pending", "Running")}
    return AutomationCore(
        name="tlt: resume crashed runs",
        trigger=_absent(after={"prefect.flow-run.Crashed"}, expect=gone_on, within=SETTLED, tag="tlt"),
        actions=[
            ChangeFlowRunState(
                state=StateType.SCHEDULED, name="AwaitingRetry", message="crashed; resumes from its checkpoint"
            )
        ],
    )


def _cancel_overdue(tag: str, most: timedelta) -> AutomationCore:
    return AutomationCore(
        name=f"tlt: cancel runs after their {tag}",
        trigger=_absent(after={"prefect.flow-run.Running"}, expect=_END, within=most, tag=tag),
        actions=[CancelFlowRun()],
    )


def _webhook(url: str) -> UUID:
    block = CustomWebhookNotificationBlock(
        name="tlt-webhook", url=url, json_data={"text": "{{subject}}\n{{body}}"}, allow_private_urls=True
    )
    return UUID(str(block.save("tlt-webhook", overwrite=True)))


def _report_failed(block_id: UUID) -> AutomationCore:
    return AutomationCore(
        name="tlt: report failed runs",
        trigger=_each(
            {f"prefect.flow-run.{state}" for state in ("Failed", "TimedOut", "Crashed")},
            match=_RUNS,
            match_related=_tagged("tlt"),
            for_each={"prefect.resource.id"},
        ),
        actions=[
            SendNotification(
                block_document_id=block_id,
                subject="TLT: {{ flow.name }}/{{ flow_run.name }} is {{ flow_run.state.name }}",
                body="{{ flow_run.state.message }}\n{{ flow_run|ui_url }}",
            )
        ],
    )


def _report_drop(block_id: UUID) -> AutomationCore:
    return AutomationCore(
        name="tlt: report a drop of acceptance",
        trigger=_each({DROPPED}, match={"prefect.resource.id": "tlt.drafter.*"}),
        actions=[
            SendNotification(
                block_document_id=block_id,
                subject="TLT: the acceptance of {{ event.resource.name }} has dropped",
                body="{{ event.payload.message }}",
            )
        ],
    )


def _each(events: set[str], **about: Any) -> EventTrigger:
    """Fires for each of the events at once."""
    return EventTrigger(expect=events, posture=Posture.Reactive, threshold=1, within=timedelta(0), **about)


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
