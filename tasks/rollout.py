"""Station: sample the step's responses."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from tlt_core import store
from tlt_core.session import Session
from tlt_core.store import Ref


@task(task_run_name="rollout-{step}", cache_policy=NO_CACHE)
def rollout(session: Session, step: int) -> Ref:
    """Prompts of the step in, groups of responses out."""
    batch = session.generate(step)
    return store.save_rollouts(batch, session.step_dir(step) / "rollouts.safetensors")
