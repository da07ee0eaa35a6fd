"""Task: sample the step's responses."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from tlt_core.items import store
from tlt_core.items.store import Ref
from tlt_core.run.session import Session


@task(task_run_name="rollout-{step}", cache_policy=NO_CACHE)
def rollout(session: Session, step: int) -> Ref:
    """Prompts of the step in, groups of responses out."""
    batch = session.sample_step(step)
    return store.save_rollouts(batch, session.step_dir(step) / "rollouts.safetensors")
