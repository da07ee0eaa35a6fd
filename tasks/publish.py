"""Task: load new weights into the rollout replicas."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from tlt_core.run.session import Session


@task(task_run_name="publish-{step}", cache_policy=NO_CACHE)
def publish(session: Session, step: int) -> int:
    """Returns the policy version of the next rollouts."""
    return session.publish(step)
