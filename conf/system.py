"""Configuration: workers, checkpoints, tracking."""

from typing import Literal

from pydantic import Field

from conf.section import Section


class ClusterConfig(Section):
    """The worker group."""

    address: str = "local"
    """local: start Ray on this machine; auto or host:port: join a running Ray cluster that this machine belongs to."""
    num_workers: int = Field(2, ge=1)
    """Number of workers (Ray actors).  Each decodes with a copy of the policy and computes a share of the update."""
    threads_per_worker: int = Field(1, ge=1)
    """CPU threads of each worker, and the CPUs that it requests from Ray."""
    gpus_per_worker: int = Field(0, ge=0, le=1)
    """1: each worker owns a GPU; 0: CPU."""
    placement: Literal["pack", "spread"] = "pack"
    """pack: place the workers on as few nodes as possible; spread: on as many as possible."""
    silence_s: float = Field(300.0, gt=0)
    """Seconds without a sign of life from a worker after which the run ends.  It is logged after 30."""
    stuck_s: float = Field(1800.0, gt=0)
    """Seconds in which no worker gets on (decodes a token, ends a training pass) after which the run ends.  It is
    logged after 300, and the workers' stacks are written to the run's folder."""
    release_rollout_memory: bool = False
    """Free the rollout's memory (keys, values, recorded hidden states) during the update.  Set it on GPUs whose memory
    does not hold both."""

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        """What workers compute on."""
        return "cuda" if self.gpus_per_worker else "cpu"


class CheckpointConfig(Section):
    """Checkpoints: what a run needs to resume."""

    every_steps: int = Field(1, ge=1)
    """RL steps between checkpoints.  The last step is always saved."""
    keep_last: int = Field(2, ge=1)
    """Number of newest checkpoints to keep."""
    keep_best: int = Field(1, ge=0)
    """Number of best checkpoints to keep besides, by `best_metric`."""
    must_save_by_s: float = Field(0.0, ge=0)
    """Seconds after SIGTERM or Ctrl-C in which the run may finish and save its step before it ends; give a pod that
    grace period.  A second signal ends it at once.  0: it ends at once, from the newest checkpoint on it goes on."""
    keep_step_files: int = Field(8, ge=1)
    """Number of newest steps whose rollouts and scores stay in `runs/NAME/steps`, besides the first step's.  Older ones
    are removed with older checkpoints."""
    best_metric: str = "val-core/all/reward/greedy"
    """Metric that ranks checkpoints; higher is better.  Checkpoints without it are not ranked."""


class TrackingConfig(Section):
    """MLflow."""

    uri: str = "sqlite:///artifacts/mlflow.db"
    """Tracking store: a SQLite file or the URL of a tracking server."""
    experiment: str = Field("tlt", pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._-]*$", max_length=200)
    """Experiment name."""
    num_sample_rollouts: int = Field(4, ge=0)
    """Responses per step that are saved as text (JSONL artifact)."""
    figure_every_steps: int = Field(1, ge=1)
    """RL steps between figures of worker timelines and response lengths."""
    system_metrics: bool = True
    """Log the use of CPU, memory, disk and network."""
    register_models: bool = True
    """Register the policy and the drafter in MLflow's model registry at the end of a run."""
