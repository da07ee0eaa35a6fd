"""Station: the policy as a folder that other software loads."""

from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from tlt_core.session import Session


@task(task_run_name="export-policy", cache_policy=NO_CACHE)
def export_policy(session: Session) -> Path:
    """Plain Hugging Face folder `policy/` of the run; the drafter, where one is trained, goes to `drafter-eagle3/`."""
    session.export_drafter(session.cfg.run_dir / "drafter-eagle3")
    return session.export_policy(session.cfg.run_dir / "policy")
