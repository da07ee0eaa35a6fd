"""One worker: a rollout replica and a shard of the policy update on one processor.

Run by the group as a Ray actor.  Each method is one phase; the millisecond decisions inside a phase (what to do while
idle) are made here and in the dispatcher.  States are time-stamped as `WorkerSpan`s, for the timeline:

    generate:  BUSY until own requests are done, then IDLE or TRAINING until rollout has ended on every worker
    update:    UPDATING
"""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from conf.schema import AlgorithmConfig, DrafterConfig, RolloutConfig, SpeculationConfig, UpdateConfig
from tlt_core import adaptive
from tlt_core.drafter.eagle3 import Eagle3Drafter
from tlt_core.drafter.eagle3_files import export_weights, load_eagle3, save_eagle3
from tlt_core.grpo.batch import TrainBatch
from tlt_core.grpo.policy import FrozenPolicy
from tlt_core.grpo.update import PolicyTrainer
from tlt_core.host_memory import keep_freed_memory
from tlt_core.model.load import load_decoder, save_hf
from tlt_core.rollout.engine import RolloutEngine, RoundTrace
from tlt_core.spot.coordinator import Action, Order, Progress, WorkerIdle
from tlt_core.spot_training import SpotResult, SpotTraining
from tlt_core.types import GenerationRequest, Rollout, SamplingParams, WorkerSpan, WorkerState

_POLL_S = 0.02  # how often an idle worker asks whether rollout has ended
_TUNER_FILE = "tuner_{}.json"  # by rank
_DRAFTER_DIR = "drafter-eagle3"  # of a checkpoint: the drafter in use
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
    drafter: DrafterConfig = DrafterConfig()
    spot_dir: Path | None = None  # where hidden states and the drafter's training state are kept; None: no training


class GenerateReport(NamedTuple):
    """What one worker did in a generation phase."""

    rounds: tuple[RoundTrace, ...]
    tuner: dict[str, Any]  # what it knows of itself, see `RecordedTuner.snapshot`; empty without speculation
    drafter_failures: int  # proposals that could not be used, since the start
    spot: SpotResult | None = None  # None: this worker trains no drafter


class DrafterPublished(NamedTuple):
    """What one worker made of a drafter candidate.  All workers agree."""

    accepted: bool
    candidate_length: float  # acceptance lengths on all workers' canaries; 0: known before
    used_length: float
    checksum: int  # of the drafter now in use


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
        self._spot: SpotTraining | None = None
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
            _newest_drafter(spec.rollout.speculation, checkpoint),
            max_live=spec.rollout.max_live_requests,
            max_len=spec.max_len,
            seed=spec.seed + self._rank,
            capture=spec.spot_dir is not None,
        )
        self._policy_version = policy_version
        self._prepare_tuner(checkpoint)
        self._prepare_spot(checkpoint)
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

    def _prepare_spot(self, checkpoint: Path | None) -> None:
        """Training in idle time goes on where the newest saved state left it."""
        spec, engine = self._spec, self._engine
        assert engine is not None, "built by load()"
        path = _newest_drafter(spec.rollout.speculation, checkpoint).drafter_path
        drafter = None if engine.speculation is None else engine.speculation.drafters.get("eagle3")
        if spec.spot_dir is None or path is None or not isinstance(drafter, Eagle3Drafter):
            return
        self._drafter = drafter
        self._spot = SpotTraining(
            spec.drafter.spot,
            model=load_eagle3(Path(path), engine.decoder.config),
            decoder=engine.decoder,
            depth=spec.drafter.depth,
            temperature=spec.rollout.temperature,
            folder=spec.spot_dir / f"worker_{self._rank}",
            resume=checkpoint is not None,
        )

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

    def generate(self, dispatcher: Any, params: SamplingParams, step: int, train_drafter: bool) -> GenerateReport:
        """Decode what the dispatcher hands out; then train the drafter, or wait, until rollout has ended everywhere.

        train_drafter: this phase's responses are kept to train on.
        """
        import ray  # the dispatcher is a Ray actor handle; the class itself runs without Ray in tests

        engine, spot = self._engine, self._spot if train_drafter else None
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

        if spot is not None:
            spot.begin(step, self._policy_version)
        while not exhausted:  # a fair share may be empty for a moment while others hold more than theirs
            engine.generate(
                pull,
                on_finish,
                params,
                on_round=on_round,
                on_captured=None if spot is None else spot.collect,
                policy_version=self._policy_version,
                worker=self._rank,
            )
        idle = WorkerIdle(self._rank, time.time())
        ray.get(pushed)
        dispatcher.report.remote(self._rank, tokens)
        self._use_idle_time(idle, lambda event: ray.get(dispatcher.ask.remote(event)), spot)
        failures = sum(engine.drafter_failures.values())
        return GenerateReport(
            tuple(rounds), adaptive.snapshot(engine), failures, None if spot is None else spot.result()
        )

    def _use_idle_time(
        self, idle: WorkerIdle, ask: Callable[[WorkerIdle | Progress], Order], spot: SpotTraining | None
    ) -> None:
        """Until the order to stop: train piece by piece when told to, else wait."""
        order, done = ask(idle), 0
        while order.action is not Action.STOP:
            has_data = spot is not None and spot.has_data
            if spot is not None and has_data and order.action is Action.TRAIN:
                spot.micro_step()
                done += 1
            else:
                time.sleep(_POLL_S)
            order = ask(Progress(self._rank, done, time.time(), has_data))
        if spot is not None:
            until_s = time.monotonic() + self._spec.drafter.spot.after_rollout_s
            while spot.has_data and time.monotonic() < until_s:
                spot.micro_step()
            spot.end()

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

    def publish_drafter(self, share: float, version: int, verify: bool) -> DrafterPublished:
        """Sum the workers' candidates, each times its share, and draft with the result from now on.

        A collective: every worker is called.  verify: the sum is nobody's own candidate, so it is measured on all
        canaries first, and refused when it accepts less than the drafter in use.
        """
        spot, engine = self._spot, self._engine
        assert spot is not None and engine is not None, "load() comes first"  # noqa: PT018
        parameters_N = spot.contribution(share)
        self._sum(parameters_N)
        candidate_length = used_length = 0.0
        if verify:
            counts_3 = torch.tensor(spot.canary_of(parameters_N), dtype=torch.float64)
            self._sum(counts_3)
            starts, candidate, used = counts_3.tolist()
            candidate_length, used_length = 1 + candidate / max(starts, 1), 1 + used / max(starts, 1)
        accepted = candidate_length >= used_length
        if accepted:
            target = _checksum(engine.decoder.head_weight)
            self._drafter.load_weights(export_weights(spot.adopt(parameters_N, is_mine=share == 1)))
            if _checksum(engine.decoder.head_weight) != target:
                raise RuntimeError(f"publishing drafter {version} changed the target's weights: stop and report this")
            adaptive.notify_change(engine, "eagle3")
        else:
            spot.reject()
        return DrafterPublished(accepted, candidate_length, used_length, spot.checksum)

    def refuse_drafter(self) -> None:
        """No candidate of this phase is published."""
        assert self._spot is not None, "load() comes first"
        self._spot.reject()

    def export_drafter(self, out_dir: Path) -> None:
        """Write the drafter in use as a folder that vLLM and SGLang load."""
        assert self._spot is not None, "load() comes first"
        save_eagle3(self._spot.used, out_dir, dtype=getattr(torch, self._spec.rollout.dtype))

    def _sum(self, values: Tensor) -> None:
        """In place, over all workers."""
        if self._world_size > 1:
            dist.all_reduce(values)

    def save(self, folder: Path) -> None:
        """Write this worker's part of a checkpoint.  The drafter's training state follows in the background."""
        assert self._trainer is not None, "load() comes first"
        self._trainer.save(folder)
        if self._spot is not None:
            self._spot.save()
            if self._rank == 0:
                self.export_drafter(folder / _DRAFTER_DIR)
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
        if self._spot is not None:
            self._spot.close()
        if dist.is_initialized():
            dist.barrier()
            if self._trainer is not None:
                self._trainer.close()
            dist.destroy_process_group()


def _newest_drafter(cfg: SpeculationConfig, checkpoint: Path | None) -> SpeculationConfig:
    """The drafter that was in use when the checkpoint was written, where there was one."""
    saved = None if checkpoint is None else checkpoint / _DRAFTER_DIR
    if cfg.drafter_path is None or saved is None or not saved.is_dir():
        return cfg
    return cfg.model_copy(update={"drafter_path": str(saved)})


def _checksum(weight: Tensor) -> int:
    """Of every 61st row: cheap, and a write to a shared tensor changes them all."""
    return int(weight[::61].contiguous().view(torch.uint8).sum(dtype=torch.int64))
