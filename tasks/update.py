"""Task: update the policy."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from tlt_core.items import store
from tlt_core.items.types import ScoredBatch
from tlt_core.run.session import Session


@task(task_run_name="policy-update-{step}", cache_policy=NO_CACHE)
def update_policy(session: Session, step: int, scored: ScoredBatch) -> None:
    """Scored responses in, which are saved first; a new policy on the worker group."""
    store.save_scored(scored, session.step_dir(step) / "scored.safetensors")
    session.update(step, scored)
