"""A limit on restarts: without it the server would restart a crashing run for ever (see `_automations.py`)."""

from prefect.runtime import flow_run

MOST = 5


class GaveUp(RuntimeError):
    """The flow run was started too often.  The text says what to do."""


def check() -> None:
    """Call it in a flow.  Raises GaveUp, which is a failure and not a crash: the server does not restart the run."""
    attempts = flow_run.run_count
    if attempts > MOST:
        raise GaveUp(
            f"flow run {flow_run.name} was started {attempts} times, {MOST} are allowed; its log says why it "
            "crashes; then start a new flow run of the same configuration: it resumes from the newest checkpoint"
        )
