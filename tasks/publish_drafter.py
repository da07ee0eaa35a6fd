"""Task: put the drafter into use that idle workers have trained.

The training itself is no task: it happens during the rollout, on workers that wait for others.
"""

from prefect import task
from prefect.cache_policies import NO_CACHE

from tlt_core.run.session import Session


@task(task_run_name="publish-drafter-{step}", cache_policy=NO_CACHE)
def publish_drafter(session: Session, step: int) -> str:
    """Returns the decision and its reason."""
    return session.drafter.publish(step)
