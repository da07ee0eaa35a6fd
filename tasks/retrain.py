"""Tasks of the registry's models.  After training: register policy and drafter; a registry that fails, and weights that
are not finite, do not fail the run.  In scheduled retraining: export the newest policy, fetch the champion, try the
drafters, record the decision.  Check whether the champion still drafts as well as at its promotion.

Only registry calls of retraining are retried: they may be repeated without doing anything twice.
"""

import logging
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from prefect import task
from prefect.cache_policies import NO_CACHE

from conf.run import RunConfig
from tasks.mlflow_run import TRACKER_ERRORS
from tasks.registry import CHALLENGER, CHAMPION, Entry, Registry, RegistryError, Version, model_name
from tlt_core.drafter.eagle3.files import load_eagle3
from tlt_core.export import drafter_trial, lineage, promotion
from tlt_core.export.drafter_trial import Trial
from tlt_core.export.promotion import Check, Decision
from tlt_core.export.record import weights_digest
from tlt_core.items.store import Ref
from tlt_core.model.config import ModelError
from tlt_core.model.load import check_finite, load_config
from tlt_core.run.progress import Progress
from tlt_core.run.session import Session

log = logging.getLogger(__name__)

_RETRIES_S = [2.0, 10.0]
_ACCEPTANCE = "acceptance_length"  # tag of a version: what it had in its trial


class Champion(NamedTuple):
    """The drafter to beat, downloaded."""

    version: Version
    folder: Path


@task(task_run_name="export-newest-checkpoint", cache_policy=NO_CACHE)
def export_checkpoint(
    cfg: RunConfig, start_model: Path, dataset: Ref, on_progress: Callable[[Progress], None]
) -> tuple[Path, int]:
    """Write the policy of the newest checkpoint to the run's `policy` folder; returns that, and the RL steps."""
    first = cfg.run_dir / "drafter-eagle3"
    resumed = cfg.with_drafter(first) if cfg.needs_first_drafter and first.is_dir() else cfg
    with Session.resume_or_init(
        resumed.for_reading(), data_dir=Path(dataset.path), start_model=start_model, on_progress=on_progress
    ) as session:
        return session.export_policy(cfg.run_dir / "policy"), session.completed_steps


@task(task_run_name="fetch-champion", cache_policy=NO_CACHE, retries=2, retry_delay_seconds=_RETRIES_S)
def fetch_champion(cfg: RunConfig, policy: Path) -> Champion | None:
    """The registry's champion; None: there is none, or it does not fit the policy's architecture."""
    registry = Registry(cfg.tracking)
    version = registry.by_alias(model_name(cfg, "drafter"), CHAMPION)
    if version is None:
        return None
    folder = cfg.run_dir / "retrain" / "champion" / _plain_name(version)
    if not folder.is_dir() or weights_digest(folder) != version.digest:
        shutil.rmtree(folder.parent, ignore_errors=True)
        registry.download(version, folder.parent)
    if weights_digest(folder) != version.digest:
        raise RegistryError(
            f"the files of {version} are not those that were registered (weights digest {weights_digest(folder)[:12]}, "
            f"registered {version.digest[:12]}); point the alias {CHAMPION!r} to another version"
        )
    try:
        load_eagle3(folder, load_config(policy))
    except ModelError:
        return None
    return Champion(version, folder)


def _plain_name(version: Version) -> str:
    """Its folder's name.  Raises RegistryError on one that leads elsewhere: the folder is deleted and made."""
    name = version.artifact
    if name in ("", "..") or Path(name).name != name:
        raise RegistryError(
            f"the tag 'artifact' of {version} is {name!r} and no plain name: somebody has changed it; point the alias "
            f"{CHAMPION!r} to another version"
        )
    return name


@task(task_run_name="find-version", cache_policy=NO_CACHE, retries=2, retry_delay_seconds=_RETRIES_S)
def find_version(cfg: RunConfig, drafter: Path) -> Version | None:
    """The version that has the weights of this folder; None: they are not registered."""
    return Registry(cfg.tracking).find(model_name(cfg, "drafter"), weights_digest(drafter))


@task(task_run_name="try-drafters", cache_policy=NO_CACHE)
def try_drafters(
    cfg: RunConfig, policy: Path, dataset: Ref, candidate: Path, champion: Champion | None
) -> dict[str, Trial]:
    """Measure plain decoding, the candidate and the champion on held-out prompts."""
    drafters = {"candidate": candidate} | ({} if champion is None else {"champion": champion.folder})
    return drafter_trial.run(cfg, policy=policy, data_dir=Path(dataset.path), drafters=drafters)


@task(task_run_name="record-decision", cache_policy=NO_CACHE, retries=2, retry_delay_seconds=_RETRIES_S)
def record_decision(
    cfg: RunConfig,
    policy: Path,
    dataset: Ref,
    candidate: Path,
    decision: Decision,
    trials: dict[str, Trial],
    key: str,
) -> Version:
    """Register the candidate as challenger, and as champion if it won, with figures and reason.

    Raises ModelError where its weights are not finite.
    """
    check_finite(candidate)
    registry = Registry(cfg.tracking)
    entry = _entry(cfg, policy, dataset, candidate, decision, trials["candidate"])
    run_id = registry.run(name=f"retrain-{cfg.name}", key=key, tags=entry.tags)
    version = registry.register(entry, run_id=run_id)
    registry.set_alias(version, CHALLENGER)
    if decision.outcome == "promoted":
        registry.promote(version)
    registry.finish(run_id, {f"{name}/{k}": float(v) for name, t in trials.items() for k, v in t._asdict().items()})
    return version


def _entry(cfg: RunConfig, policy: Path, dataset: Ref, candidate: Path, decision: Decision, trial: Trial) -> Entry:
    tags = lineage.drafter_tags(cfg, policy, dataset=dataset) | {
        _ACCEPTANCE: f"{trial.accept_length:.4f}",
        "tokens_per_s": f"{trial.tokens_per_s:.1f}",
        "decision": decision.outcome,
        "reason": decision.reason,
    }
    name, card = model_name(cfg, "drafter"), lineage.drafter_card(cfg, tags)
    return Entry(name, candidate, weights_digest(candidate), tags, card)


@task(task_run_name="check-champion", cache_policy=NO_CACHE)
def check_champion(cfg: RunConfig, policy: Path, dataset: Ref) -> Check:
    """Measure the champion on held-out prompts of the present data, and compare with the figure of its promotion.

    A champion without a figure, which someone has promoted by hand, is compared with the first one found here.
    """
    registry = Registry(cfg.tracking)
    version = registry.by_alias(model_name(cfg, "drafter"), CHAMPION)
    if version is None:
        return Check("nothing", f"{model_name(cfg, 'drafter')} has no champion: 'tlt retrain' makes one")
    champion, found = fetch_champion.fn(cfg, policy), 1.0  # a drafter that does not fit the policy drafts nothing
    if champion is not None:
        found = drafter_trial.acceptance(cfg, policy=policy, data_dir=Path(dataset.path), drafter=champion.folder)
    if _ACCEPTANCE not in version.tags:
        registry.tag(version, _ACCEPTANCE, f"{found:.4f}")
    before = float(version.tags.get(_ACCEPTANCE, found))
    run_id = registry.run(name=f"check-{cfg.name}", key=f"check-{cfg.name}", tags={"run_name": cfg.name})
    registry.finish(run_id, {"champion/accept_length": found, "champion/accept_length_at_promotion": before})
    return promotion.check(found, before, name=str(version), cfg=cfg.retrain)


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
