"""Tasks of an RL step, in the order in which `flows/train.py` calls them, and the export of what was trained.

The drafter's training is no task: it happens during the rollout, on workers that wait for others.
"""

from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from tlt_core.items import store
from tlt_core.items.types import RolloutBatch, ScoredBatch
from tlt_core.run.session import Session


@task(task_run_name="rollout-{step}", cache_policy=NO_CACHE)
def rollout(session: Session, step: int) -> RolloutBatch:
    """Prompts of the step in, groups of responses out."""
    return session.sample_step(step)


@task(task_run_name="reward-{step}", cache_policy=NO_CACHE)
def reward(session: Session, step: int, rollouts: RolloutBatch) -> ScoredBatch:
    """Responses in, rewards and group advantages out."""
    return session.score(step, rollouts)


@task(task_run_name="publish-drafter-{step}", cache_policy=NO_CACHE)
def publish_drafter(session: Session, step: int) -> str:
    """Put the drafter into use that idle workers have trained; returns the decision and its reason."""
    return session.drafter.publish(step)


@task(task_run_name="resample-{step}", cache_policy=NO_CACHE)
def resample(session: Session, step: int, scored: ScoredBatch) -> ScoredBatch:
    """One more round of rollout and scoring; the informative groups are kept."""
    return session.resample(step, scored)


@task(task_run_name="compare-with-plain-{step}", cache_policy=NO_CACHE)
def compare_with_plain(session: Session, step: int) -> dict[str, float]:
    """The step's rollouts once more, by plain decoding: the same tokens; returns the ratio of times."""
    return session.rollout.compare_with_plain(session.params, step=step)


@task(task_run_name="policy-update-{step}", cache_policy=NO_CACHE)
def update_policy(session: Session, step: int, scored: ScoredBatch) -> None:
    """Scored responses in, which are saved first; a new policy on the worker group."""
    store.save_scored(scored, session.step_dir(step) / "scored.safetensors")
    session.update(step, scored)


@task(task_run_name="publish-{step}", cache_policy=NO_CACHE)
def publish(session: Session, step: int) -> int:
    """Load new weights into the rollout replicas; returns the policy version of the next rollouts."""
    return session.publish(step)


@task(task_run_name="evaluate-{step}", cache_policy=NO_CACHE)
def evaluate(session: Session, step: int) -> dict[str, float]:
    """Greedy accuracy, mean@k and pass@k on the validation prompts."""
    return session.validation.run(step)


@task(task_run_name="checkpoint-{step}", cache_policy=NO_CACHE)
def checkpoint(session: Session, step: int) -> Path:
    """Save everything that a resume needs; returns the checkpoint's folder."""
    return session.save_checkpoint(step)


@task(task_run_name="export-policy", cache_policy=NO_CACHE)
def export_policy(session: Session) -> Path:
    """Returns the Hugging Face folder `policy/`; a drafter that the run trains is written to `drafter-eagle3/`."""
    session.drafter.export(session.cfg.run_dir / "drafter-eagle3", steps=session.completed_steps)
    return session.export_policy(session.cfg.run_dir / "policy")
