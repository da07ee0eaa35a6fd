"""Station: what the drafter has learnt in idle time goes into use.

The training itself needs no station: it happens inside the rollout, on workers that wait for others.
"""

from prefect import task
from prefect.cache_policies import NO_CACHE

from tlt_core.session import Session


@task(task_run_name="publish-drafter-{step}", cache_policy=NO_CACHE)
def publish_drafter(session: Session, step: int) -> str:
    """Returns what was decided, and why."""
    return session.publish_drafter(step)
