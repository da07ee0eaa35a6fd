"""Task: sample the step's responses."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from tlt_core.items.types import RolloutBatch
from tlt_core.run.session import Session


@task(task_run_name="rollout-{step}", cache_policy=NO_CACHE)
def rollout(session: Session, step: int) -> RolloutBatch:
    """Prompts of the step in, groups of responses out."""
    return session.sample_step(step)
