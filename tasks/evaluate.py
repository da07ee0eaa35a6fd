"""Task: validation."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from tlt_core.run.session import Session


@task(task_run_name="evaluate-{step}", cache_policy=NO_CACHE)
def evaluate(session: Session, step: int) -> dict[str, float]:
    """Greedy accuracy, mean@k and pass@k on the validation prompts."""
    return session.validation.run(step)
