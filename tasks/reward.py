"""Tasks: score responses, and sample more of them for dynamic sampling."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from tlt_core.items.types import RolloutBatch, ScoredBatch
from tlt_core.run.session import Session


@task(task_run_name="reward-{step}", cache_policy=NO_CACHE)
def reward(session: Session, step: int, rollouts: RolloutBatch) -> ScoredBatch:
    """Responses in, rewards and group advantages out."""
    return session.score(step, rollouts)


@task(task_run_name="resample-{step}", cache_policy=NO_CACHE)
def resample(session: Session, step: int, scored: ScoredBatch) -> ScoredBatch:
    """One more round of rollout and scoring; the informative groups are kept."""
    return session.resample(step, scored)
