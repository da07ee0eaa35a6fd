"""Task: update the policy."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from tlt_core.items import store
from tlt_core.items.store import Ref
from tlt_core.run.session import Session


@task(task_run_name="policy-update-{step}", cache_policy=NO_CACHE)
def update_policy(session: Session, step: int, scored: Ref) -> None:
    """Scored responses in; a new policy on the worker group."""
    session.update(step, store.load_scored(scored.path))
