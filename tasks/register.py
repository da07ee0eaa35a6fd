"""Tasks: register a trained policy or drafter in MLflow.  A registry that fails does not fail the run."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from conf.run import RunConfig
from tasks.mlflow_run import TRACKER_ERRORS
from tasks.registry import CHALLENGER, CHAMPION, Entry, Registry, Version, model_name
from tlt_core.export import lineage
from tlt_core.export.record import weights_digest
from tlt_core.items.store import Ref

log = logging.getLogger(__name__)


@task(task_run_name="register-policy", cache_policy=NO_CACHE)
def register_policy(
    cfg: RunConfig, folder: Path, dataset: Ref, metrics: Mapping[str, float], tracker_run_id: str
) -> str:
    """Register a version of the policy; it becomes the champion unless the present one validated better.

    Returns "NAME version N", or the empty string if the registry failed.
    """
    tags = lineage.policy_tags(cfg, folder, dataset=dataset)
    score = metrics.get(cfg.checkpoint.best_metric)
    if score is not None:
        tags["validation"] = f"{score:.6g}"
    entry = Entry(model_name(cfg, "policy"), folder, tags["policy_digest"], tags, lineage.policy_card(cfg, tags))
    return _leniently(cfg, lambda registry: _enter(registry, entry, tracker_run_id, rival=_validated_better(score)))


@task(task_run_name="register-drafter", cache_policy=NO_CACHE)
def register_drafter(
    cfg: RunConfig, folder: Path, policy: Path, dataset: Ref, metrics: Mapping[str, float], tracker_run_id: str
) -> str:
    """Register a version of the drafter as challenger; `retrain` measures whether it is better than the champion.

    Returns "NAME version N", or the empty string if the registry failed.
    """
    tags = lineage.drafter_tags(cfg, policy, dataset=dataset) | {
        name.removeprefix("drafter/"): f"{value:.6g}" for name, value in metrics.items() if name.startswith("drafter/")
    }
    digest = weights_digest(folder)
    entry = Entry(model_name(cfg, "drafter"), folder, digest, tags, lineage.drafter_card(cfg, tags))
    return _leniently(cfg, lambda registry: _enter(registry, entry, tracker_run_id, rival=lambda _: True))


def _enter(registry: Registry, entry: Entry, run_id: str, *, rival: Callable[[Version | None], bool]) -> Version:
    """Register as challenger, and as champion unless `rival(champion)` says that the present one is better."""
    known = registry.find(entry.model, entry.digest)
    if known is not None:
        return known  # the same weights again; aliases stay, as they may have been moved by hand
    owner = run_id or registry.run(name=entry.model, key=f"{entry.model}-{entry.digest}", tags={})
    version = registry.register(entry, run_id=owner)
    if not run_id:
        registry.finish(owner, {})  # this MLflow run only holds the files
    registry.set_alias(version, CHALLENGER)
    if not rival(registry.by_alias(entry.model, CHAMPION)):
        registry.set_alias(version, CHAMPION)
    return version


def _validated_better(score: float | None) -> Callable[[Version | None], bool]:
    """Did the champion validate better?  Unless both have a figure, the newer policy is preferred."""

    def better(champion: Version | None) -> bool:
        if champion is None or score is None or "validation" not in champion.tags:
            return False
        return float(champion.tags["validation"]) > score

    return better


def _leniently(cfg: RunConfig, call: Callable[[Registry], Version]) -> str:
    try:
        return str(call(Registry(cfg.tracking)))
    except TRACKER_ERRORS as error:
        log.warning("MLflow's registry at %s failed (the files are in the run's folder): %s", cfg.tracking.uri, error)
        return ""
