"""A run that crashes again and again is given up: the server would start it for ever (`_automations.py`)."""

from prefect.runtime import flow_run

MOST = 5


class GaveUp(RuntimeError):
    """The flow run has been started too often.  The text says what to do."""


def check() -> None:
    """Raises GaveUp, which is a failure and not a crash, so the server leaves the run alone.  Call it in a flow."""
    attempts = flow_run.run_count
    if attempts > MOST:
        raise GaveUp(
            f"flow run {flow_run.name} was started {attempts} times, {MOST} are allowed; find out in its log why it "
            "crashes, then start a new flow run of the same configuration: it resumes from the newest checkpoint"
        )
