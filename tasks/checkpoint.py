"""Task: save everything that a resume needs."""

from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from tlt_core.run.session import Session


@task(task_run_name="checkpoint-{step}", cache_policy=NO_CACHE)
def checkpoint(session: Session, step: int) -> Path:
    """Returns the checkpoint's folder."""
    return session.save_checkpoint(step)
