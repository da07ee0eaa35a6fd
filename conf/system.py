"""Configuration: workers, checkpoints, tracking."""

import importlib.metadata
import re
from typing import Literal

from pydantic import Field, field_validator

from conf.section import MANY, MOST_STEPS, Section

_FOLDER = ("", "file", "sqlite")
_DATABASES = ("postgresql", "mysql", "mssql")  # with a driver behind a plus sign: mysql+pymysql
_SERVERS = ("http", "https", "databricks", "databricks-uc", "uc")
_RAY_COUNTS = 10_000  # to a whole
_SMALLEST_SHARE = 0.01  # of a GPU
_SECRET_OPTION = re.compile(r"([?&;]\w*(?:password|passwd|secret|token)=)[^&;\s'\"]*", re.IGNORECASE)


class ClusterConfig(Section):
    """The worker group."""

    address: str = "local"
    """local: start Ray on this machine; auto or host:port: join a running Ray cluster that this machine belongs to."""
    num_workers: int = Field(2, ge=1, le=4096)
    """Number of workers (Ray actors).  Each decodes with a copy of the policy and computes a share of the update."""
    threads_per_worker: int = Field(1, ge=1, le=1024)
    """CPU threads of each worker, and the CPUs that it requests from Ray."""
    gpus_per_worker: float = Field(0.0, ge=0)
    """1: each worker owns a GPU; 0: CPU.  A part of 1: as many workers as fit share a GPU and its memory evenly, two
    with 0.5 (and with 0.4), four with 0.25.  Then rollouts run on our engine, and the update's back end is torch."""
    placement: Literal["pack", "spread"] = "pack"
    """pack: place the workers on as few nodes as possible; spread: on as many as possible."""
    silence_s: float = Field(300.0, gt=0)
    """Seconds without a sign of life from a worker after which the run ends.  It is logged after 30."""
    stuck_s: float = Field(1800.0, gt=0)
    """The run ends after this many seconds without progress (a token, a training pass) on any worker.  It is
    logged after 300, and the workers' stacks are written to the run's folder."""
    release_rollout_memory: bool = False
    """Free the rollout's memory (keys, values, recorded hidden states) during the update.  Set it on GPUs whose memory
    does not hold both."""

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        """What workers compute on."""
        return "cuda" if self.gpus_per_worker else "cpu"

    @property
    def workers_per_gpu(self) -> int:
        """That fit on one, and share it evenly; 1 on CPUs.  Ray counts in ten-thousandths, so 0.3333 is a third."""
        return _RAY_COUNTS // round(_RAY_COUNTS * self.gpus_per_worker) if self.gpus_per_worker else 1

    @property
    def gpu_share(self) -> float:
        """What a worker requests of a GPU from Ray: as much as all that fit on it can have."""
        return _RAY_COUNTS // self.workers_per_gpu / _RAY_COUNTS if self.gpus_per_worker else 0.0

    @property
    def shares_gpus(self) -> bool:
        """May two workers of this group be on one GPU?"""
        return min(self.workers_per_gpu, self.num_workers) > 1

    @field_validator("gpus_per_worker")
    @classmethod
    def _one_gpu_or_a_part_of_it(cls, gpus: float) -> float:
        if gpus and not _SMALLEST_SHARE <= gpus <= 1:
            raise ValueError(
                f"a worker computes on one GPU or on a part of it, found {gpus:g}: set it to 1, or to a part from "
                f"{_SMALLEST_SHARE:g} on (0.5: two workers share a GPU).  Workers divide a model that one GPU does not "
                "hold: rollout.vllm.tensor_parallel, update.backend.zero_stage=3"
            )
        return gpus


class CheckpointConfig(Section):
    """Checkpoints: what a run needs to resume."""

    every_steps: int = Field(1, ge=1, le=MOST_STEPS)
    """RL steps between checkpoints.  The last step is always saved."""
    keep_last: int = Field(2, ge=1, le=MANY)
    """Number of newest checkpoints to keep."""
    keep_best: int = Field(1, ge=0, le=MANY)
    """Number of best checkpoints to keep besides, by `best_metric`."""
    must_save_by_s: float = Field(0.0, ge=0)
    """Seconds after SIGTERM or Ctrl-C in which `tlt train` may finish and save its step before it ends.  A second one
    ends it at once.  0: it ends at once; it goes on from the newest checkpoint.  A Prefect worker kills its flows."""
    keep_step_files: int = Field(8, ge=1, le=MOST_STEPS)
    """Number of newest steps whose rollouts and scores stay in `runs/NAME/steps`, besides the first step's.  Older ones
    are removed with older checkpoints."""
    best_metric: str = "val-core/all/reward/greedy"
    """Metric that ranks checkpoints; higher is better.  Checkpoints without it are not ranked."""


class TrackingConfig(Section):
    """MLflow."""

    uri: str = "sqlite:///artifacts/mlflow.db"
    """Tracking store: a SQLite file, or the URL of a tracking server or a database.  It holds no password: a server's
    is in $MLFLOW_TRACKING_USERNAME and $MLFLOW_TRACKING_PASSWORD, a database's in the database's own password file."""
    experiment: str = Field("tlt", pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._-]*$", max_length=200)
    """Experiment name."""
    num_sample_rollouts: int = Field(4, ge=0, le=MANY)
    """Responses per step that are saved as text (JSONL artifact)."""
    figure_every_steps: int = Field(1, ge=1, le=MOST_STEPS)
    """RL steps between figures of worker timelines and response lengths."""
    system_metrics: bool = True
    """Log the use of CPU, memory, disk and network."""
    register_models: bool = True
    """Register the policy and the drafter in MLflow's model registry at the end of a run."""

    @field_validator("uri")
    @classmethod
    def _store_is_possible(cls, uri: str) -> str:
        if problem := why_no_store(uri):
            raise ValueError(problem)
        return uri


def without_password(text: str) -> str:
    """The text with *** in place of passwords in URLs: `://user:secret@` and `password=secret`."""
    text = re.sub(r"://[^/\s'\"]*@|://[^:/\s'\"]*:[^\s'\"]*@", "://***@", text)
    return re.sub(_SECRET_OPTION, r"\1***", text)


def why_no_store(uri: str) -> str:
    """Why this cannot be a tracking store, and the remedy; empty where it can.  A password is not repeated."""
    scheme, colon, rest = uri.partition(":")
    scheme, shown = scheme if colon else "", without_password(uri)
    is_server = scheme in ("http", "https")
    user = re.match(r"//[^/?#]*@" if is_server else r"//[^:/]*:[^@]*@", rest)  # as requests and SQLAlchemy read it
    if user or re.search(_SECRET_OPTION, rest):
        remedy = (
            "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in the environment"
            if is_server
            else "use the database's password file: ~/.pgpass for PostgreSQL, ?read_default_file=~/.my.cnf for MySQL"
        )
        return f"{shown!r} holds a password, which would stand in logs and checkpoints; leave it out and {remedy}"
    plugged_in = {point.name for point in importlib.metadata.entry_points(group="mlflow.tracking_store")}
    if scheme.partition("+")[0] not in (*_FOLDER, *_DATABASES, *_SERVERS) and scheme not in plugged_in:
        return (
            f"{shown!r}: MLflow knows no store of kind {scheme!r}; give a SQLite file (sqlite:///FOLDER/mlflow.db), a "
            f"server (http://HOST:5000) or a database ({', '.join(f'{name}://' for name in _DATABASES)})"
        )
    if (scheme == "sqlite" and not rest.startswith("///")) or (is_server and not re.match(r"//[^/]", rest)):
        return f"{shown!r} is incomplete; write sqlite:///FOLDER/mlflow.db, or http://HOST:5000"
    return ""
