"""What goes between the driver and its workers: what a worker is built from, and what it reports after each phase."""

from pathlib import Path
from typing import Any, NamedTuple

from conf.drafter import DrafterConfig
from conf.rollout import RolloutConfig
from conf.update import AlgorithmConfig, UpdateConfig
from tlt_core.grpo.passes import Key
from tlt_core.idle_training.training import IdleTrainingResult
from tlt_core.items.types import WorkerSpan
from tlt_core.rollout.engine import RoundTrace
from tlt_core.rollout.vllm.replica import VllmSpec


class TrainerSpec(NamedTuple):
    """What a worker needs to know to train the policy."""

    update: UpdateConfig
    algorithm: AlgorithmConfig
    total_steps: int
    max_new_tokens: int
    temperature: float


class WorkerSpec(NamedTuple):
    """What every worker of a group is built from."""

    model_dir: Path
    rollout: RolloutConfig
    max_len: int  # positions of a KV slot
    trainer: TrainerSpec | None  # None: generation only
    threads: int
    device: str
    seed: int = 0  # of the tuner's explorations
    drafter: DrafterConfig = DrafterConfig()
    idle_training_dir: Path | None = (
        None  # where hidden states and the drafter's training state are kept; None: no training
    )
    vllm: VllmSpec | None = None  # needed where `rollout.engine` is vllm
    release_memory: bool = False  # of the rollout, while the policy is trained
    gpu_bytes: int = 0  # most that a worker takes of its GPU, as planned
    workers_per_gpu: int = 1
    decodes: bool = True  # False: the workers train and sample nothing


class GenerateReport(NamedTuple):
    rounds: tuple[RoundTrace, ...]  # this, tuner and drafter_failures: see `DecodeReport`
    tuner: dict[str, Any]
    drafter_failures: int
    idle_training: IdleTrainingResult | None = None  # None: this worker trains no drafter
    suspended: tuple[str, ...] = ()  # drafters that have collapsed
    streamed: tuple[Key, ...] = ()  # passes of the update whose gradient this worker has


class UpdateReport(NamedTuple):
    spans: tuple[WorkerSpan, ...]
    metrics: dict[str, float]  # the same on every worker
    memory_bytes: int = 0  # most that it has held so far
