"""Tasks of scheduled retraining: export the newest policy, fetch the champion, try the drafters, record the decision.

Only the registry tasks are retried: they may be repeated without doing anything twice.
"""

import json
import os
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from prefect import task
from prefect.cache_policies import NO_CACHE

from conf.run import RunConfig
from tasks.registry import CHALLENGER, CHAMPION, Entry, Registry, RegistryError, Version, model_name
from tlt_core.drafter.eagle3.files import load_eagle3
from tlt_core.export import drafter_trial, lineage
from tlt_core.export.drafter_trial import Trial
from tlt_core.export.promotion import Decision
from tlt_core.export.record import weights_digest
from tlt_core.items.store import Ref, read_json_lines, write_atomically
from tlt_core.model.config import ModelError
from tlt_core.model.load import check_finite, load_config
from tlt_core.run.progress import Progress
from tlt_core.run.session import Session

_RETRIES_S = [2.0, 10.0]


class Champion(NamedTuple):
    """The drafter to beat, downloaded."""

    version: Version
    folder: Path


@task(task_run_name="export-newest-checkpoint", cache_policy=NO_CACHE)
def export_checkpoint(cfg: RunConfig, start_model: Path, dataset: Ref, on_progress: Callable[[Progress], None]) -> Path:
    """Write the policy of the newest checkpoint to the run's `policy` folder."""
    first = cfg.run_dir / "drafter-eagle3"
    resumed = cfg.with_drafter(first) if cfg.needs_first_drafter and first.is_dir() else cfg
    with Session.resume_or_init(
        resumed, data_dir=Path(dataset.path), start_model=start_model, on_progress=on_progress
    ) as session:
        return session.export_policy(cfg.run_dir / "policy")


@task(task_run_name="fetch-champion", cache_policy=NO_CACHE, retries=2, retry_delay_seconds=_RETRIES_S)
def fetch_champion(cfg: RunConfig, policy: Path) -> Champion | None:
    """The registry's champion; None: there is none, or it does not fit the policy's architecture."""
    registry = Registry(cfg.tracking)
    version = registry.by_alias(model_name(cfg, "drafter"), CHAMPION)
    if version is None:
        return None
    folder = cfg.run_dir / "retrain" / "champion" / version.artifact
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
        registry.set_alias(version, CHAMPION)
    registry.finish(run_id, {f"{name}/{k}": float(v) for name, t in trials.items() for k, v in t._asdict().items()})
    return version


def _entry(cfg: RunConfig, policy: Path, dataset: Ref, candidate: Path, decision: Decision, trial: Trial) -> Entry:
    tags = lineage.drafter_tags(cfg, policy, dataset=dataset) | {
        "acceptance_length": f"{trial.accept_length:.4f}",
        "tokens_per_s": f"{trial.tokens_per_s:.1f}",
        "decision": decision.outcome,
        "reason": decision.reason,
    }
    name, card = model_name(cfg, "drafter"), lineage.drafter_card(cfg, tags)
    return Entry(name, candidate, weights_digest(candidate), tags, card)


class Journal:
    """`runs/NAME/retrain.jsonl`: one line per decision, the newest last."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def rows(self) -> list[dict[str, Any]]:
        """All lines.  Raises StoreError."""
        return read_json_lines(self._path)

    def last_decided(self) -> dict[str, Any] | None:
        """The newest line that says promoted or refused."""
        decided = [row for row in self.rows() if row["outcome"] in ("promoted", "refused")]
        return decided[-1] if decided else None

    def append(self, row: dict[str, Any]) -> None:
        """Add a line; it is on the disk when this returns."""
        kept = [*self.rows(), {"time": datetime.now(UTC).isoformat(timespec="seconds"), "pid": os.getpid(), **row}]
        text = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in kept)
        write_atomically(self._path, lambda partial: partial.write_text(text, encoding="utf-8"))
