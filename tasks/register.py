"""Tasks: register a trained policy or drafter in MLflow.

Neither a registry that fails nor weights that are not finite fail the run: a warning says what is not registered.
"""

import logging
import math
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
from tlt_core.model.config import ModelError
from tlt_core.model.load import check_finite

log = logging.getLogger(__name__)


@task(task_run_name="register-policy", cache_policy=NO_CACHE)
def register_policy(
    cfg: RunConfig, folder: Path, dataset: Ref, metrics: Mapping[str, float], tracker_run_id: str
) -> str:
    """Register a version of the policy as challenger; it becomes the champion unless the present one validated better.
    Without a figure of its own it does not.

    Returns "NAME version N", or the empty string if it is not registered.
    """
    tags = lineage.policy_tags(cfg, folder, dataset=dataset)
    score = metrics.get(cfg.checkpoint.best_metric)
    if score is not None and math.isfinite(score):
        tags["validation"] = f"{score:.6g}"
    else:
        found, remedy = "missing" if score is None else score, ""
        if score is None:
            never = cfg.evaluation.every_steps == 0
            remedy = "; set evaluation.every_steps above 0" if never else "; no prompt of that task was validated"
        log.warning(
            "%s is %s, so the policy cannot become the %s%s", cfg.checkpoint.best_metric, found, CHAMPION, remedy
        )
        score = None
    entry = Entry(model_name(cfg, "policy"), folder, tags["policy_digest"], tags, lineage.policy_card(cfg, tags))
    return _leniently(cfg, lambda registry: _enter(registry, entry, tracker_run_id, score=score))


@task(task_run_name="register-drafter", cache_policy=NO_CACHE)
def register_drafter(
    cfg: RunConfig, folder: Path, policy: Path, dataset: Ref, metrics: Mapping[str, float], tracker_run_id: str
) -> str:
    """Register a version of the drafter as challenger; `retrain` measures whether it is better than the champion.

    Returns "NAME version N", or the empty string if it is not registered.
    """
    own = {name: value for name, value in metrics.items() if name.startswith("drafter/")}
    if unsound := [name for name, value in own.items() if not math.isfinite(value)]:
        log.warning("not finite, so the drafter's version does not have them as tags: %s", ", ".join(unsound))
    tags = lineage.drafter_tags(cfg, policy, dataset=dataset) | {
        name.removeprefix("drafter/"): f"{value:.6g}" for name, value in own.items() if name not in unsound
    }
    digest = weights_digest(folder)
    entry = Entry(model_name(cfg, "drafter"), folder, digest, tags, lineage.drafter_card(cfg, tags))
    return _leniently(cfg, lambda registry: _enter(registry, entry, tracker_run_id, score=None))


def _enter(registry: Registry, entry: Entry, run_id: str, *, score: float | None) -> Version:
    """Register as challenger, and as champion unless it has no score or the champion validated better.

    Raises ModelError.
    """
    check_finite(entry.folder)
    known = registry.find(entry.model, entry.digest)
    if known is not None:
        return known  # the same weights again; aliases stay, as they may have been moved by hand
    owner = run_id or registry.run(name=entry.model, key=f"{entry.model}-{entry.digest}", tags={})
    version = registry.register(entry, run_id=owner)
    if not run_id:
        registry.finish(owner, {})  # this MLflow run only holds the files
    registry.set_alias(version, CHALLENGER)
    champion = registry.by_alias(entry.model, CHAMPION)
    best = math.nan if champion is None else float(champion.tags.get("validation", "nan"))  # which is above nothing
    if score is not None and not best > score:
        registry.promote(version)
    return version


def _leniently(cfg: RunConfig, call: Callable[[Registry], Version]) -> str:
    try:
        return str(call(Registry(cfg.tracking)))
    except TRACKER_ERRORS as error:
        log.warning("MLflow's registry at %s failed (the files are in the run's folder): %s", cfg.tracking.uri, error)
    except ModelError as error:
        log.warning("not registered: %s", error)
    return ""
