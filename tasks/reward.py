"""Tasks: score responses, and sample more of them for dynamic sampling."""

from typing import NamedTuple

from prefect import task
from prefect.cache_policies import NO_CACHE

from tlt_core.items import store
from tlt_core.items.store import Ref
from tlt_core.run.session import Session


class Scored(NamedTuple):
    """Saved scores, and whether the step needs more groups before its update."""

    ref: Ref
    wants_more: bool


@task(task_run_name="reward-{step}", cache_policy=NO_CACHE)
def reward(session: Session, step: int, rollouts: Ref) -> Scored:
    """Responses in, rewards and group advantages out."""
    scored = session.score(step, store.load_rollouts(rollouts.path))
    ref = store.save_scored(scored, session.step_dir(step) / "scored.safetensors")
    return Scored(ref, session.needs_more_groups(scored))


@task(task_run_name="resample-{step}", cache_policy=NO_CACHE)
def resample(session: Session, step: int, scored: Ref) -> Scored:
    """One more round of rollout and scoring; the informative groups are kept."""
    more = session.resample(step, store.load_scored(scored.path))
    ref = store.save_scored(more, session.step_dir(step) / "scored.safetensors")
    return Scored(ref, session.needs_more_groups(more))
