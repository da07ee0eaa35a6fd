"""One worker: a rollout replica and a shard of the policy update on one processor.

Run by the group as a Ray actor.  Each method is one phase; the millisecond decisions inside a phase (what to do while
idle) are made here and in the dispatcher.  States are time-stamped as `WorkerSpan`s, for the timeline:

    generate:  BUSY until own requests are done, then IDLE or TRAINING until rollout has ended on every worker
    update:    UPDATING
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from conf.schema import AlgorithmConfig, DrafterConfig, RolloutConfig, UpdateConfig
from tlt_core import adaptive
from tlt_core.canary import CanaryReport, WeightDigest
from tlt_core.cluster.drafting import DrafterPublished, Drafting, newest_drafter
from tlt_core.cluster.phase_end import PhaseEnd
from tlt_core.cluster.rendezvous import host_store, join_group
from tlt_core.cluster.shared_folders import unseen
from tlt_core.cluster.vllm_replica import VllmSpec, start_vllm
from tlt_core.giving_way import giving_way
from tlt_core.grpo.batch import TrainBatch
from tlt_core.grpo.policy import FrozenPolicy
from tlt_core.grpo.update import PolicyTrainer
from tlt_core.host_memory import keep_freed_memory
from tlt_core.machine.precision import as_torch
from tlt_core.model.load import load_decoder, save_hf
from tlt_core.rollout.engine import RolloutEngine, RoundTrace
from tlt_core.serving.vllm_rollout import VllmRollout
from tlt_core.serving.vllm_server import SpecCounters
from tlt_core.spot.comparison import Comparison
from tlt_core.spot.coordinator import Action, Order, Progress, WorkerIdle
from tlt_core.spot_training import SpotResult, SpotTraining
from tlt_core.types import GenerationRequest, Rollout, SamplingParams, WorkerSpan, WorkerState

_POLL_S = 0.02  # how often an idle worker asks whether rollout has ended
_BLIND_S = 0.2  # longest piece of training whose end the driver awaits: no worker announces it
_PATIENCE = 1.5  # micro-steps' time, after which one that got too little of its core is let through
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
    vllm: VllmSpec | None = None  # None: our own engine
    release_memory: bool = False  # of the rollout, while the policy is trained


class GenerateReport(NamedTuple):
    """What one worker did in a generation phase."""

    rounds: tuple[RoundTrace, ...]  # none of vLLM, which does not tell
    tuner: dict[str, Any]  # what it knows of itself, see `RecordedTuner.snapshot`; empty without speculation
    drafter_failures: int  # proposals that could not be used, since the start
    spot: SpotResult | None = None  # None: this worker trains no drafter
    canary: CanaryReport = CanaryReport((), ())
    chains: SpecCounters | None = None  # of vLLM


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
        self._engine: RolloutEngine | None = None  # this one, or vLLM
        self._vllm: VllmRollout | None = None
        self._trainer: PolicyTrainer | None = None
        self._reference: FrozenPolicy | None = None
        self._drafting: Drafting | None = None
        self._policy_version = 0
        self._store: dist.TCPStore | None = None  # of worker 0: where the group meets
        self._phase_end = PhaseEnd(None)

    def alive(self) -> None:
        """Says nothing: the answer is that there is one."""

    def unseen(self, files: Mapping[Path, int]) -> tuple[Path, ...]:
        """Which of the driver's files this node does not see."""
        return unseen(files)

    def host_group(self, address: str) -> str:
        """Worker 0 alone: where all workers meet, on its own node."""
        self._store, meeting_point = host_store(address, world_size=self._world_size)
        return meeting_point

    def join(self, meeting_point: str, own_address: str) -> None:
        """Form the torch.distributed group of all workers (gloo on CPU, NCCL on GPU)."""
        join_group(
            meeting_point,
            own_address=own_address,
            rank=self._rank,
            world_size=self._world_size,
            device=self._device,
            store=self._store,
        )
        self._phase_end = PhaseEnd.at(meeting_point, world_size=self._world_size)

    def load(self, checkpoint: Path | None, policy_version: int) -> None:
        """Build replica and trainer from the start model, or from a checkpoint's parts."""
        spec = self._spec
        self._policy_version = policy_version
        if spec.vllm is None:
            self._load_own_engine(checkpoint)
        else:
            self._vllm = start_vllm(
                spec.vllm,
                spec.rollout,
                model_dir=spec.model_dir,
                max_len=spec.max_len,
                threads=spec.threads,
                rank=self._rank,
                seed=spec.seed,
                policy_version=policy_version,
            )
        if spec.trainer is None:
            return
        self._trainer = self._make_trainer(spec.trainer)
        if checkpoint is not None:
            self._trainer.load(checkpoint)
            self._load_weights(self._trainer.weights(), policy_version)
        if spec.trainer.algorithm.kl.coef > 0:
            self._reference = FrozenPolicy(
                load_decoder(spec.model_dir, dtype=as_torch(spec.trainer.update.dtype), device=spec.device),
                temperature=spec.trainer.temperature,
                token_budget=spec.trainer.update.tokens_per_micro_batch,
                device=self._device,
            )

    def _load_own_engine(self, checkpoint: Path | None) -> None:
        spec = self._spec
        replica = load_decoder(spec.model_dir, dtype=as_torch(spec.rollout.dtype), device=spec.device)
        speculation = newest_drafter(spec.rollout.speculation, checkpoint)
        self._engine = adaptive.make_engine(
            replica,
            speculation,
            max_live=spec.rollout.max_live_requests,
            max_len=spec.max_len,
            seed=spec.seed + self._rank,
            capture=spec.spot_dir is not None,
            kv_memory_fraction=spec.rollout.kv_memory_fraction,
        )
        self._drafting = Drafting(self._engine, rank=self._rank, world_size=self._world_size)
        self._drafting.prepare(checkpoint)
        if spec.spot_dir is not None:
            self._drafting.train_in_idle_time(
                spec.drafter,
                speculation,
                temperature=spec.rollout.temperature,
                compute_dtype=as_torch(spec.rollout.dtype if spec.trainer is None else spec.trainer.update.dtype),
                folder=spec.spot_dir,
                resume=checkpoint is not None,
            )

    def _load_weights(self, weights: Iterable[tuple[str, Tensor]], policy_version: int) -> None:
        if self._vllm is not None:
            self._vllm.load_weights(weights, policy_version=policy_version)
        else:
            assert self._engine is not None, "load() comes first"
            self._engine.load_weights(weights)

    def _make_trainer(self, spec: TrainerSpec) -> PolicyTrainer:
        return PolicyTrainer(
            load_decoder(self._spec.model_dir, dtype=as_torch(spec.update.dtype), device=self._spec.device),
            spec.update,
            algorithm=spec.algorithm,
            total_steps=spec.total_steps,
            max_new_tokens=spec.max_new_tokens,
            temperature=spec.temperature,
            rank=self._rank,
            world_size=self._world_size,
            device=self._device,
        )

    def generate(self, dispatcher: Any, params: SamplingParams, step: int, is_training: bool) -> GenerateReport:
        """Decode what the dispatcher hands out; then train the drafter, or wait, until rollout has ended everywhere.

        is_training: these are the step's rollouts, from which the drafter learns and on which it is judged.
        """
        import ray  # the dispatcher is a Ray actor handle; the class itself runs without Ray in tests

        vllm, engine, drafting = self._vllm, self._engine, self._drafting
        spot = drafting.spot if is_training and drafting is not None else None
        pushed: list[Any] = []
        rounds: list[RoundTrace] = []
        exhausted, tokens, reported_s = False, 0, time.monotonic()
        self._phase_end.begin()

        def pull(wanted: int) -> Sequence[GenerationRequest]:
            nonlocal exhausted
            if exhausted:
                return ()
            requests, exhausted = ray.get(dispatcher.pull.remote(self._rank, wanted))
            return requests

        def on_finish(rollout: Rollout) -> None:
            pushed.append(dispatcher.push.remote(self._rank, rollout))

        def on_round(trace: RoundTrace) -> None:
            rounds.append(trace)
            if is_training and drafting is not None:
                drafting.observe(trace.report)
            on_tokens(trace.tokens)

        def on_tokens(count: int) -> None:
            nonlocal tokens, reported_s
            tokens += count
            if time.monotonic() - reported_s > _REPORT_S:
                dispatcher.report.remote(self._rank, tokens)
                reported_s = time.monotonic()

        if spot is not None:
            spot.begin(step, self._policy_version)
        while not exhausted:  # a fair share may be empty for a moment while others hold more than theirs
            if vllm is not None:
                vllm.generate(pull, on_finish, params, on_tokens=on_tokens, worker=self._rank)
                continue
            assert engine is not None, "load() comes first"
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
        if spot is not None:
            until_s = time.monotonic() + self._spec.drafter.spot.after_rollout_s
            while spot.has_data and time.monotonic() < until_s:
                spot.micro_step(lambda: time.monotonic() >= until_s)
            spot.end()
        if vllm is not None:
            return GenerateReport((), {}, 0, chains=vllm.counters())
        assert engine is not None and drafting is not None, "load() comes first"  # noqa: PT018
        failures = sum(engine.drafter_failures.values())
        return GenerateReport(
            tuple(rounds),
            adaptive.snapshot(engine),
            failures,
            None if spot is None else spot.result(),
            drafting.canary(),
        )

    def wait(self, dispatcher: Any) -> SpotResult:
        """Train the drafter, as in the rest of the rollout before, until the dispatcher's phase of waiting ends."""
        import ray

        assert self._drafting is not None and self._drafting.spot is not None, "else there is no use for it"  # noqa: PT018
        spot, idle = self._drafting.spot, WorkerIdle(self._rank, time.time())
        self._phase_end.begin()
        self._use_idle_time(idle, lambda event: ray.get(dispatcher.ask.remote(event)), spot, longest_s=_BLIND_S)
        return spot.result()

    def _use_idle_time(
        self,
        idle: WorkerIdle,
        ask: Callable[[WorkerIdle | Progress], Order],
        spot: SpotTraining | None,
        *,
        longest_s: float = math.inf,
    ) -> None:
        """Until the order to stop: train piece by piece when told to, else wait.  longest_s: of a piece."""
        order, done = ask(idle), 0
        while order.action is not Action.STOP:
            has_data = spot is not None and spot.has_data
            if spot is not None and has_data and order.action is Action.TRAIN:
                with self._second_to_all():
                    done += spot.micro_step(self._phase_end.reached, longest_s=longest_s)
            else:
                time.sleep(_POLL_S)
            order = ask(Progress(self._rank, done, time.time(), has_data))
        self._phase_end.announce()

    def _second_to_all(self) -> AbstractContextManager[None]:
        """For a micro-step.  With several threads it is their pool that computes, which would not give way."""
        if self._spec.threads > 1 or self._device.type != "cpu":
            return nullcontext()
        return giving_way(_PATIENCE * self._spec.drafter.spot.micro_step_s)

    def update(self, steps: Sequence[TrainBatch]) -> UpdateReport:
        """One RL step's optimizer steps, on this worker's share of each."""
        trainer = self._trainer
        assert trainer is not None, "load() comes first"
        self._release_rollout_memory()
        started_s = time.time()
        metrics = trainer.steps(steps)
        return UpdateReport((WorkerSpan(self._rank, WorkerState.UPDATING, started_s, time.time()),), metrics)

    def _release_rollout_memory(self) -> None:
        if self._spec.release_memory and self._engine is not None:
            self._engine.release_memory()

    def supervised_step(self, batch: TrainBatch) -> dict[str, float]:
        """One step of supervised training (the cold start)."""
        trainer = self._trainer
        assert trainer is not None, "load() comes first"
        return trainer.supervised_step(batch)

    def reference_logprobs(self, batch: TrainBatch) -> Tensor:
        """Log-probs of the share's tokens under the model RL started from."""
        assert self._reference is not None, "built only when algorithm.kl.coef > 0"
        self._release_rollout_memory()
        return self._reference.logprobs(batch)

    def publish(self, policy_version: int) -> tuple[int, int]:
        """Copy the trainer's weights into the rollout replica, without touching disk (except for vLLM); the version and
        a digest of what was copied, which all workers must agree about."""
        assert self._trainer is not None, "load() comes first"
        digest = WeightDigest()
        self._load_weights(digest.through(self._trainer.weights()), policy_version)
        self._policy_version = policy_version
        if self._drafting is not None:
            self._drafting.changed()
        return policy_version, digest.value

    def publish_drafter(self, shares: Sequence[float], version: int, measured: Comparison | None) -> DrafterPublished:
        """See `Drafting.publish`."""
        assert self._drafting is not None, "load() comes first"
        return self._drafting.publish(shares, version, measured=measured)

    def refuse_drafter(self) -> None:
        """No candidate of this phase is published."""
        assert self._drafting is not None, "load() comes first"
        self._drafting.refuse()

    def exchange_ngrams(self) -> None:
        """See `NgramDrafter.exchange`."""
        assert self._drafting is not None, "load() comes first"
        self._drafting.exchange_ngrams()

    def export_drafter(self, out_dir: Path) -> None:
        """Write the drafter in use as a folder that vLLM and SGLang load."""
        assert self._drafting is not None, "load() comes first"
        self._drafting.export(out_dir, dtype=as_torch(self._spec.rollout.dtype))

    def save(self, folder: Path) -> None:
        """Write this worker's part of a checkpoint."""
        assert self._trainer is not None, "load() comes first"
        self._trainer.save(folder)
        if self._drafting is not None:
            self._drafting.save(folder, dtype=as_torch(self._spec.rollout.dtype))

    def export(self, out_dir: Path, tokenizer_from: Path, dtype: str) -> None:
        """Write the policy as a plain Hugging Face folder (rank 0 writes, all take part in gathering)."""
        assert self._trainer is not None, "load() comes first"
        weights = self._trainer.weights()
        if self._rank == 0:
            save_hf(weights, self._trainer.config, out_dir, tokenizer_from=tokenizer_from, dtype=as_torch(dtype))
        else:
            for _ in weights:
                pass

    def leave(self) -> None:
        """Leave the torch.distributed group in step with the others; without the barrier gloo may abort at exit."""
        if self._drafting is not None:
            self._drafting.close()
        if self._vllm is not None:
            self._vllm.close()
        if dist.is_initialized():
            dist.barrier()
            if self._trainer is not None:
                self._trainer.close()
            dist.destroy_process_group()
