"""One worker: a rollout replica and a shard of the policy update on one processor.

Run by the group as a Ray actor.  Each method is one phase; the millisecond decisions inside a phase (what to do while
idle) are made here.  States are time-stamped as `WorkerSpan`s, from which the timeline is drawn:

    generate:  BUSY until own requests are done, then IDLE until rollout has ended on every worker
    update:    UPDATING
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from conf.schema import AlgorithmConfig, RolloutConfig, UpdateConfig
from tlt_core import adaptive
from tlt_core.grpo.batch import TrainBatch
from tlt_core.grpo.policy import FrozenPolicy
from tlt_core.grpo.update import PolicyTrainer
from tlt_core.host_memory import keep_freed_memory
from tlt_core.model.load import load_decoder, save_hf
from tlt_core.rollout.engine import RolloutEngine, RoundTrace
from tlt_core.types import GenerationRequest, Rollout, SamplingParams, WorkerSpan, WorkerState

_POLL_S = 0.02  # how often an idle worker asks whether rollout has ended
_TUNER_FILE = "tuner_{}.json"  # by rank
_REPORT_S = 0.5  # how often a busy worker reports its token count


class TrainerSpec(NamedTuple):
    """What a worker needs to know to train."""

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


class GenerateReport(NamedTuple):
    """What one worker did in a generation phase."""

    spans: tuple[WorkerSpan, ...]
    rounds: tuple[RoundTrace, ...]
    tuner: dict[str, Any]  # what it knows of itself, see `RecordedTuner.snapshot`; empty without speculation
    drafter_failures: int  # proposals that could not be used, since the start


class UpdateReport(NamedTuple):
    """What one worker did in an update."""

    spans: tuple[WorkerSpan, ...]
    metrics: dict[str, float]  # the same on every worker


class Worker:
    """See the module docstring.  Methods are called by `WorkerGroup`."""

    def __init__(self, rank: int, world_size: int, spec: WorkerSpec) -> None:
        torch.set_num_threads(spec.threads)
        keep_freed_memory()
        self._rank, self._world_size, self._spec = rank, world_size, spec
        self._device = torch.device(spec.device)
        self._engine: RolloutEngine | None = None
        self._trainer: PolicyTrainer | None = None
        self._reference: FrozenPolicy | None = None
        self._policy_version = 0

    def join(self, init_method: str) -> None:
        """Form the torch.distributed group of all workers (gloo on CPU, NCCL on GPU)."""
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=init_method, rank=self._rank, world_size=self._world_size)

    def load(self, checkpoint: Path | None, policy_version: int) -> None:
        """Build replica and trainer from the start model, or from a checkpoint's parts."""
        spec = self._spec
        dtype = getattr(torch, spec.rollout.dtype)
        replica = load_decoder(spec.model_dir, dtype=dtype, device=spec.device)
        self._engine = adaptive.make_engine(
            replica,
            spec.rollout.speculation,
            max_live=spec.rollout.max_live_requests,
            max_len=spec.max_len,
            seed=spec.seed + self._rank,
        )
        self._policy_version = policy_version
        self._prepare_tuner(checkpoint)
        if spec.trainer is None:
            return
        self._trainer = self._make_trainer(spec.trainer, dtype)
        if checkpoint is not None:
            self._trainer.load(checkpoint)
            self._engine.load_weights(self._trainer.weights())
        if spec.trainer.algorithm.kl.coef > 0:
            self._reference = FrozenPolicy(
                load_decoder(spec.model_dir, dtype=dtype, device=spec.device),
                temperature=spec.trainer.temperature,
                token_budget=spec.trainer.update.tokens_per_micro_batch,
                device=self._device,
            )

    def _prepare_tuner(self, checkpoint: Path | None) -> None:
        """What it had learnt before the restart, or a first measurement."""
        assert self._engine is not None, "built by load()"
        saved = None if checkpoint is None else checkpoint / _TUNER_FILE.format(self._rank)
        if saved is not None and saved.is_file() and self._engine.speculation is not None:
            self._engine.speculation.tuner.load_state_dict(json.loads(saved.read_text()))
        else:
            adaptive.calibrate(self._engine)

    def _make_trainer(self, spec: TrainerSpec, dtype: torch.dtype) -> PolicyTrainer:
        return PolicyTrainer(
            load_decoder(self._spec.model_dir, dtype=dtype, device=self._spec.device),
            spec.update,
            algorithm=spec.algorithm,
            total_steps=spec.total_steps,
            max_new_tokens=spec.max_new_tokens,
            temperature=spec.temperature,
            rank=self._rank,
            world_size=self._world_size,
            device=self._device,
        )

    def generate(self, dispatcher: Any, params: SamplingParams) -> GenerateReport:
        """Decode what the dispatcher hands out, then stay idle until rollout has ended everywhere."""
        import ray  # the dispatcher is a Ray actor handle; the class itself runs without Ray in tests

        engine = self._engine
        assert engine is not None, "load() comes first"
        pushed: list[Any] = []
        rounds: list[RoundTrace] = []
        exhausted, tokens, reported_s = False, 0, time.monotonic()

        def pull(wanted: int) -> Sequence[GenerationRequest]:
            nonlocal exhausted
            if exhausted:
                return ()
            requests, exhausted = ray.get(dispatcher.pull.remote(self._rank, wanted))
            return requests

        def on_finish(rollout: Rollout) -> None:
            pushed.append(dispatcher.push.remote(self._rank, rollout))

        def on_round(trace: RoundTrace) -> None:
            nonlocal tokens, reported_s
            tokens += trace.tokens
            rounds.append(trace)
            if time.monotonic() - reported_s > _REPORT_S:
                dispatcher.report.remote(self._rank, tokens)
                reported_s = time.monotonic()

        busy_s = time.time()
        while not exhausted:  # a fair share may be empty for a moment while others hold more than theirs
            engine.generate(
                pull,
                on_finish,
                params,
                on_round=on_round,
                policy_version=self._policy_version,
                worker=self._rank,
            )
        idle_s = time.time()
        ray.get(pushed)
        dispatcher.report.remote(self._rank, tokens)
        while not ray.get(dispatcher.over.remote()):
            time.sleep(_POLL_S)
        spans = (
            WorkerSpan(self._rank, WorkerState.BUSY, busy_s, idle_s),
            WorkerSpan(self._rank, WorkerState.IDLE, idle_s, time.time()),
        )
        return GenerateReport(spans, tuple(rounds), adaptive.snapshot(engine), sum(engine.drafter_failures.values()))

    def update(self, steps: Sequence[TrainBatch]) -> UpdateReport:
        """One RL step's optimizer steps, on this worker's share of each."""
        trainer = self._trainer
        assert trainer is not None, "load() comes first"
        started_s = time.time()
        metrics = trainer.steps(steps)
        return UpdateReport((WorkerSpan(self._rank, WorkerState.UPDATING, started_s, time.time()),), metrics)

    def supervised_step(self, batch: TrainBatch) -> dict[str, float]:
        """One step of supervised training (the cold start)."""
        trainer = self._trainer
        assert trainer is not None, "load() comes first"
        return trainer.supervised_step(batch)

    def reference_logprobs(self, batch: TrainBatch) -> Tensor:
        """Log-probs of the share's tokens under the model RL started from."""
        assert self._reference is not None, "built only when algorithm.kl.coef > 0"
        return self._reference.logprobs(batch)

    def publish(self, policy_version: int) -> None:
        """Copy the trainer's weights into the rollout replica, without touching disk."""
        assert self._trainer is not None, "load() comes first"
        assert self._engine is not None, "load() comes first"
        self._engine.load_weights(self._trainer.weights())
        self._policy_version = policy_version

    def save(self, folder: Path) -> None:
        """Write this worker's part of a checkpoint."""
        assert self._trainer is not None, "load() comes first"
        self._trainer.save(folder)
        if self._engine is not None and self._engine.speculation is not None:
            state = json.dumps(self._engine.speculation.tuner.state_dict())
            (folder / _TUNER_FILE.format(self._rank)).write_text(state)

    def export(self, out_dir: Path, tokenizer_from: Path, dtype: str) -> None:
        """Write the policy as a plain Hugging Face folder (rank 0 writes, all take part in gathering)."""
        assert self._trainer is not None, "load() comes first"
        weights = self._trainer.weights()
        if self._rank == 0:
            save_hf(weights, self._trainer.config, out_dir, tokenizer_from=tokenizer_from, dtype=getattr(torch, dtype))
        else:
            for _ in weights:
                pass

    def leave(self) -> None:
        """Leave the torch.distributed group in step with the others; without the barrier gloo may abort at exit."""
        if dist.is_initialized():
            dist.barrier()
            if self._trainer is not None:
                self._trainer.close()
            dist.destroy_process_group()
