"""Task: write the policy and the drafter as folders that other software loads."""

from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from tlt_core.run.session import Session


@task(task_run_name="export-policy", cache_policy=NO_CACHE)
def export_policy(session: Session) -> Path:
    """Returns the Hugging Face folder `policy/`; a drafter that the run trains is written to `drafter-eagle3/`."""
    session.drafter.export(session.cfg.run_dir / "drafter-eagle3", steps=session.completed_steps)
    return session.export_policy(session.cfg.run_dir / "policy")
