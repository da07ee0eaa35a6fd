"""The model registry: policies and drafters as versions of MLflow models, with aliases, tags and a card.

    tlt-demo-policy     one version per trained policy       champion: the best validated, if any was
    tlt-demo-drafter    one version per trained drafter      champion: the one to serve (`retrain` decides)

The newest version of each is the challenger.  A champion's tag `champion_before` names the version that it replaced:
a roll-back puts the alias there, and the tag `rolled_back` on the version that it leaves.  A version's files are
artifacts of the MLflow run that made it (`runs:/ID/drafter-eagle3-<digest>`).  Every call may be repeated.
"""

import json
import logging
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

from conf.run import RunConfig
from conf.system import TrackingConfig
from tasks.mlflow_run import TRACKER_ERRORS, artifact_location, experiment_id, set_patience
from tlt_core.items.store import read_json_lines, write_atomically
from tlt_core.machine.file_lock import Locked, exclusive

log = logging.getLogger(__name__)

CHAMPION, CHALLENGER = "champion", "challenger"
DIGEST = "weights_digest"  # of the version's own files
BEFORE, ROLLED_BACK = "champion_before", "rolled_back"
_ARTIFACT = "artifact"  # where they are in the version's run
_LONGEST_TAG = 5000  # characters


class RegistryError(RuntimeError):
    """The registry cannot be used for promotion.  The text names the reason and the remedy."""


class Entry(NamedTuple):
    """What `Registry.register` takes."""

    model: str  # "tlt-demo-drafter"
    folder: Path
    digest: str
    tags: Mapping[str, str]
    card: str  # markdown


class Version(NamedTuple):
    """A registered version.  Version("tlt-demo-drafter", "3", run_id, "drafter-eagle3-0f..", tags)"""

    model: str
    number: str
    run_id: str
    artifact: str
    tags: Mapping[str, str]

    @property
    def digest(self) -> str:
        return self.tags.get(DIGEST, "")

    def __str__(self) -> str:
        return f"{self.model} version {self.number}"


def model_name(cfg: RunConfig, kind: str) -> str:
    """Name of the registered model.  kind: policy or drafter."""
    return f"{cfg.tracking.experiment}-{cfg.name}-{kind}"


class Registry:
    """MLflow's registry in the run's tracking store.  All methods raise `TRACKER_ERRORS`."""

    def __init__(self, cfg: TrackingConfig) -> None:
        set_patience()
        artifact_location(cfg)  # the folder of a sqlite store
        self._cfg = cfg
        self._client = MlflowClient(cfg.uri)

    def require(self) -> None:
        """Raises RegistryError when it does not answer, so that training does not begin without it."""
        try:
            self._client.search_registered_models(max_results=1)
        except TRACKER_ERRORS as error:
            raise RegistryError(
                f"MLflow's registry at {self._cfg.uri} does not answer ({error}); promotion is recorded there: start "
                "the server, or set tracking.uri"
            ) from None

    def run(self, *, name: str, key: str, tags: Mapping[str, str]) -> str:
        """Id of the MLflow run with this key; a new run if there is none."""
        experiment = experiment_id(self._client, self._cfg)
        found = self._client.search_runs([experiment], filter_string=f"tags.`tlt.key` = '{key}'", max_results=1)
        if found:
            return str(found[0].info.run_id)
        created = self._client.create_run(experiment, run_name=name, tags={**tags, "tlt.key": key})
        return str(created.info.run_id)

    def finish(self, run_id: str, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a run made by `run`, and end it."""
        for name, value in metrics.items():
            self._client.log_metric(run_id, name, value)
        self._client.set_terminated(run_id, "FINISHED")

    def register(self, entry: Entry, *, run_id: str) -> Version:
        """A new version, or the existing one with these weights and new tags."""
        try:
            self._client.create_registered_model(entry.model, tags={"made_by": "tlt"})
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        existing = self.find(entry.model, entry.digest)
        if existing is not None:
            for key, value in entry.tags.items():
                self.tag(existing, key, value)
            return existing._replace(tags={**existing.tags, **entry.tags})
        artifact = f"{entry.folder.name}-{entry.digest[:12]}"
        self._client.log_artifacts(run_id, str(entry.folder), artifact)
        tags = {**entry.tags, DIGEST: entry.digest, _ARTIFACT: artifact}
        created = self._client.create_model_version(
            entry.model,
            source=f"runs:/{run_id}/{artifact}",
            run_id=run_id,
            tags={key: value[:_LONGEST_TAG] for key, value in tags.items()},
            description=entry.card,
            await_creation_for=0,
        )
        log.info("registered %s version %s", entry.model, created.version)
        return _version(created)

    def find(self, model: str, digest: str) -> Version | None:
        """The oldest version with these weights; None: there is none."""
        found = self._client.search_model_versions(f"name = '{model}' and tags.{DIGEST} = '{digest}'")
        return _version(min(found, key=lambda v: int(v.version))) if found else None

    def by_alias(self, model: str, alias: str) -> Version | None:
        """The version with the alias; None: there is none."""
        try:
            return _version(self._client.get_model_version_by_alias(model, alias))
        except MlflowException as error:
            # "no such alias", as sqlite and the server report it
            if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                return None
            raise

    def by_number(self, model: str, number: str) -> Version | None:
        """The version with this number; None: there is none."""
        found = self._client.search_model_versions(f"name = '{model}' and version_number = {int(number)}")
        return _version(found[0]) if found else None

    def promote(self, version: Version) -> None:
        """Make it the champion, and remember which one it replaces."""
        champion = self.by_alias(version.model, CHAMPION)
        if champion is not None and champion.number != version.number:
            self.tag(version, BEFORE, champion.number)
        self.set_alias(version, CHAMPION)

    def tag(self, version: Version, key: str, value: str) -> None:
        self._client.set_model_version_tag(version.model, version.number, key, value[:_LONGEST_TAG])

    def set_alias(self, version: Version, alias: str) -> None:
        self._client.set_registered_model_alias(version.model, alias, version.number)

    def download(self, version: Version, folder: Path) -> Path:
        """The version's files, in a folder below `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        return Path(self._client.download_artifacts(version.run_id, version.artifact, str(folder)))


def _version(found: ModelVersion) -> Version:
    tags = dict(found.tags)
    return Version(found.name, str(found.version), found.run_id or "", tags.get(_ARTIFACT, ""), tags)


def last_decided(journal: Path) -> dict[str, Any] | None:
    """The newest line of `runs/NAME/retrain.jsonl` that says promoted or refused.  Raises StoreError."""
    rows = reversed(read_json_lines(journal))
    return next((row for row in rows if row["outcome"] in ("promoted", "refused")), None)


def write_down(journal: Path, row: dict[str, Any]) -> None:
    """Add a line to `retrain.jsonl` (one per decision) or `acceptance.jsonl` (per check); then it is on the disk."""
    kept = [*read_json_lines(journal), {"time": _now(), "pid": os.getpid(), **row}]
    text = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in kept)
    write_atomically(journal, lambda partial: partial.write_text(text, encoding="utf-8"))


def roll_back(cfg: RunConfig, *, kind: str, to: str | None) -> tuple[Version, Version]:
    """The champion before, and the champion now.  Raises RegistryError.

    kind: drafter or policy.  to: number of the version; None: the one that the champion has replaced.  Retraining does
    not promote again what was rolled back; a roll-back to it does.
    """
    try:
        with exclusive(cfg.run_dir / "retrain" / "lock"):  # a retraining at work could promote against the old champion
            left, version = _move_champion(cfg, model_name(cfg, kind), to)
    except Locked as other:
        raise RegistryError(f"{other}; end it first, or wait for its decision") from None
    reason = f"{version.model}: from version {left.number} to version {version.number} by hand"
    write_down(cfg.run_dir / "retrain.jsonl", {"outcome": "rolled back", "reason": reason})
    return left, version


def _move_champion(cfg: RunConfig, model: str, to: str | None) -> tuple[Version, Version]:
    registry = Registry(cfg.tracking)
    registry.require()
    left = registry.by_alias(model, CHAMPION)
    if left is None:
        raise RegistryError(f"{model} has no champion at {cfg.tracking.uri}; check tracking.uri and the run's name")
    number = to or left.tags.get(BEFORE)
    if number is None:
        raise RegistryError(f"{left} has replaced no champion; name the version that shall be it: --to NUMBER")
    version = registry.by_number(model, number)
    if version is None:
        raise RegistryError(f"{model} has no version {number}; MLflow's pages list its versions (make ui)")
    if version.number == left.number:
        raise RegistryError(f"{left} is the champion already")
    if int(version.number) > int(left.number):  # forward again
        registry.promote(version)
        registry.tag(version, ROLLED_BACK, "")
    else:
        registry.tag(left, ROLLED_BACK, _now())
        registry.set_alias(version, CHAMPION)
    return left, version


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
