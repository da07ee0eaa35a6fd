"""The model registry: policies and drafters as versions of MLflow models, with aliases, tags and a card.

    tlt-demo-policy     one version per trained policy       champion: the best validated, if any was
    tlt-demo-drafter    one version per trained drafter      champion: the one to serve (`retrain` decides)

The newest version of each is the challenger.  A champion's tag `champion_before` names the version that it replaced:
a roll-back puts the alias there, and the tag `rolled_back` on the version that it leaves.

A version's files are artifacts of the MLflow run that made it (`runs:/ID/drafter-eagle3-<digest>`).  Its tags record
data set, run and checkpoint.  Registering the same weights again returns the existing version, so every call may be
repeated.
"""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

from conf.run import RunConfig
from conf.system import TrackingConfig
from tasks.mlflow_run import TRACKER_ERRORS, artifact_location, experiment_id

log = logging.getLogger(__name__)

CHAMPION, CHALLENGER = "champion", "challenger"
DIGEST = "weights_digest"  # of the version's own files
BEFORE, ROLLED_BACK = "champion_before", "rolled_back"
_ARTIFACT = "artifact"  # where they are in the version's run
_LONGEST_TAG = 5000  # characters
_DIGEST_SHOWN = 12


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
        """Digest of its weights."""
        return self.tags.get(DIGEST, "")

    def __str__(self) -> str:
        return f"{self.model} version {self.number}"


def model_name(cfg: RunConfig, kind: str) -> str:
    """Name of the registered model.  kind: policy or drafter."""
    return f"{cfg.tracking.experiment}-{cfg.name}-{kind}"


class Registry:
    """MLflow's registry in the run's tracking store.  All methods raise `TRACKER_ERRORS`."""

    def __init__(self, cfg: TrackingConfig) -> None:
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # seconds, not MLflow's default of minutes
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
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
        self._make_model(entry.model)
        existing = self.find(entry.model, entry.digest)
        if existing is not None:
            for key, value in entry.tags.items():
                self.tag(existing, key, value)
            return existing._replace(tags={**existing.tags, **entry.tags})
        artifact = f"{entry.folder.name}-{entry.digest[:_DIGEST_SHOWN]}"
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
        """Set a tag; a later value replaces an earlier one."""
        self._client.set_model_version_tag(version.model, version.number, key, value[:_LONGEST_TAG])

    def set_alias(self, version: Version, alias: str) -> None:
        """Point the alias to the version."""
        self._client.set_registered_model_alias(version.model, alias, version.number)

    def download(self, version: Version, folder: Path) -> Path:
        """The version's files, in a folder below `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        return Path(self._client.download_artifacts(version.run_id, version.artifact, str(folder)))

    def _make_model(self, name: str) -> None:
        try:
            self._client.create_registered_model(name, tags={"made_by": "tlt"})
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise


def _version(found: ModelVersion) -> Version:
    tags = dict(found.tags)
    return Version(found.name, str(found.version), found.run_id or "", tags.get(_ARTIFACT, ""), tags)
