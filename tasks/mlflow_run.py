"""One MLflow run; it neither stops nor delays training.

Calls go through an `Outbox`: a tracking server that does not answer gets them once it answers again.  The run's own
files (`track.py`) are complete in any case, and the next attempt at the run sends the steps that MLflow lacks.
"""

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlflow
from mlflow import MlflowClient
from mlflow.entities import LifecycleStage, Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.utils.time import get_current_time_millis
from sqlalchemy.exc import SQLAlchemyError

from conf.system import TrackingConfig
from tasks.outbox import Outbox

log = logging.getLogger(__name__)

# Failures of a tracking store: MLflow's, the database's, network and disk (requests' errors are OSErrors).
TRACKER_ERRORS = (MlflowException, SQLAlchemyError, OSError)
_LONGEST_PARAM = 500  # characters; older stores accept no more
_LONGEST_DIGEST = 36
_STEP_METRIC = "training/global_step"  # in every row
# A new sqlite store takes some seconds on a busy machine.  A server that is slower is reported later, by its run id.
_START_S = 20.0
# For what is still to be sent; the run's folder has it in any case.  Who interrupts a run does not wait that long.
_END_S, _END_INTERRUPTED_S = 60.0, 5.0


class MlflowRun:
    """Starts a run, or goes on with the run of an earlier attempt."""

    def __init__(self, cfg: TrackingConfig, *, run_name: str, resume_id: str, on_start: Callable[[str], None]) -> None:
        set_patience()
        os.environ.pop("MLFLOW_RUN_ID", None)  # `start_run` would go on with that run, which is somebody else's
        self.run_id = ""
        self.experiment_id = ""
        self.uri = cfg.uri
        self._cfg = cfg
        self._is_new = False
        self._logged_steps: set[int] = set()
        self._outbox = Outbox(f"MLflow at {cfg.uri}", errors=TRACKER_ERRORS, refused=self._is_refusal)
        self._outbox.put(lambda: self._start(run_name, resume_id, on_start))
        self._outbox.settle(within_s=_START_S)

    @property
    def link(self) -> str:
        """Address of the run's page; empty if the store is no server, or has not answered yet."""
        if not self.uri.startswith(("http://", "https://")) or not self.run_id:
            return ""
        return f"{self.uri.rstrip('/')}/#/experiments/{self.experiment_id}/runs/{self.run_id}?{VIEW}"

    def metrics(self, values: Mapping[str, float], *, step: int) -> None:
        """Log the metrics of a step, unless an earlier attempt has logged them."""
        now = get_current_time_millis()
        batch = [Metric(name, value, now, step) for name, value in values.items()]
        self._outbox.put(lambda: self._metrics(batch, step))

    def describe(
        self, params: Mapping[str, Any], *, tags: Mapping[str, str], data: Mapping[str, str], digest: str
    ) -> None:
        """Parameters (nested ones flattened: `rollout/num_samples`), tags and data set of a new run.

        Does nothing if an earlier attempt began the run: MLflow's parameters cannot change.
        """
        self._outbox.put(lambda: self._describe(params, tags, data, digest) if self._is_new else None)

    def tag(self, name: str, value: str) -> None:
        self._outbox.put(lambda: self._client.set_tag(self.run_id, name, value))

    def artifact(self, path: Path, *, folder: str = "") -> None:
        self._outbox.put(lambda: self._client.log_artifact(self.run_id, str(path), artifact_path=folder or None))

    def end(self, status: str) -> None:
        """Close the run: FINISHED, FAILED or KILLED."""
        self._outbox.put(lambda: mlflow.end_run(status))
        self.settle(within_s=_END_INTERRUPTED_S if status == "KILLED" else _END_S)
        self._outbox.close()

    def settle(self, *, within_s: float) -> None:
        """Wait for what is still to be sent; a warning says what is not sent then."""
        left = self._outbox.settle(within_s=within_s)
        if left:
            log.warning("MLflow lacks the last %d calls of this run; its folder has all of them", left)

    def _start(self, run_name: str, resume_id: str, on_start: Callable[[str], None]) -> None:
        mlflow.set_tracking_uri(self._cfg.uri)
        mlflow.set_system_metrics_sampling_interval(5)
        self._client = MlflowClient(self._cfg.uri)
        self.experiment_id = experiment_id(self._client, self._cfg)
        run_id = resume_id if resume_id and self._exists(resume_id) else None
        run = mlflow.start_run(
            run_id=run_id,
            run_name=run_name,
            experiment_id=self.experiment_id,
            log_system_metrics=self._cfg.system_metrics,
        )
        self._is_new = run_id is None
        self.run_id = run.info.run_id
        if not self._is_new:
            history = self._client.get_metric_history(self.run_id, _STEP_METRIC)
            self._logged_steps = {metric.step for metric in history}
        on_start(self.run_id)

    def _metrics(self, batch: list[Metric], step: int) -> None:
        if step not in self._logged_steps:
            self._client.log_batch(self.run_id, metrics=batch)

    def _describe(
        self, params: Mapping[str, Any], tags: Mapping[str, str], data: Mapping[str, str], digest: str
    ) -> None:
        from mlflow.data.code_dataset_source import CodeDatasetSource
        from mlflow.data.meta_dataset import MetaDataset

        flat = [Param(name, str(value)[:_LONGEST_PARAM]) for name, value in flatten(params).items()]
        self._client.log_batch(self.run_id, params=flat, tags=[RunTag(*tag) for tag in tags.items()])
        meta_dataset: Any = MetaDataset  # concrete, but its base class declares an abstract method more
        found = meta_dataset(CodeDatasetSource(tags=dict(data)), name=data["kind"], digest=digest[:_LONGEST_DIGEST])
        mlflow.log_input(found, context="training")

    def _exists(self, run_id: str) -> bool:
        try:
            return self._client.get_run(run_id).info.lifecycle_stage == "active"
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            log.warning("MLflow run %s of the earlier attempt is gone from %s: a new one begins", run_id, self._cfg.uri)
            return False

    def _is_refusal(self, error: Exception) -> bool:
        """Would the same call always fail?  Then it must not hold up the calls behind it.  A run must have begun."""
        if not self.run_id:
            return False
        if isinstance(error, MlflowException):
            return 400 <= error.get_http_status_code() < 500
        return isinstance(error, FileNotFoundError)


# MLflow 3.17 opens an experiment on an empty page of traces, whatever its kind; with this, on its runs.
VIEW = "workflowType=machine_learning"
_TAGS = {
    "mlflow.note.content": (
        "Runs of TLT: reinforcement learning with adaptive speculative decoding. Each run has rewards, response "
        "lengths, acceptance of drafts, use of idle time and the time of each phase by step, and figures and sampled "
        "responses as artifacts. docs/metrics.md says what each metric is."
    ),
}


def set_patience() -> None:
    """A server that is down costs seconds a call; with MLflow's defaults it costs minutes."""
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")


def experiment_id(client: MlflowClient, cfg: TrackingConfig) -> str:
    """Id of the experiment, which is made if it is missing.  A deleted one keeps its name and takes no run, so it is
    restored."""
    existing = client.get_experiment_by_name(cfg.experiment)
    if existing is None:
        return str(client.create_experiment(cfg.experiment, artifact_location=artifact_location(cfg), tags=_TAGS))
    if existing.lifecycle_stage != LifecycleStage.ACTIVE:
        client.restore_experiment(existing.experiment_id)
        log.warning(
            "MLflow's experiment %r was deleted and is restored, with its runs, since this run goes there; set "
            "tracking.experiment for another one",
            cfg.experiment,
        )
    for name, value in _TAGS.items():
        if name not in existing.tags:  # another kind, or a text of the user's, stays
            client.set_experiment_tag(existing.experiment_id, name, value)
    return str(existing.experiment_id)


def artifact_location(cfg: TrackingConfig) -> str | None:
    """Where artifacts of a new experiment go: beside a sqlite file; None: a tracking server decides."""
    folder = store_folder(cfg.uri)
    return None if folder is None else (folder / "mlartifacts" / cfg.experiment).as_uri()


def store_folder(uri: str) -> Path | None:
    """Absolute folder of a sqlite tracking store, created if missing; None for other stores."""
    if not uri.startswith("sqlite:///"):
        return None
    folder = Path(uri.removeprefix("sqlite:///")).absolute().parent
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}, "c": [2, 3]} -> {"a/b": 1, "c": [2, 3]}"""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}/")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
