"""One worker: a rollout replica and a share of the policy update on one processor.

Run by the group as a Ray actor.  A phase is one call.  States are time-stamped as `WorkerSpan`s, for the timeline: BUSY
until its own requests are done, IDLE, TRAINING or STREAMING until rollout has ended on every worker, then UPDATING.
"""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from torch import Tensor

from tlt_core.cluster.dispatcher import OfferedPass
from tlt_core.cluster.drafting import Drafting
from tlt_core.cluster.engines import Engines
from tlt_core.cluster.heartbeat import begin_heartbeat
from tlt_core.cluster.messages import GenerateReport, UpdateReport, WorkerSpec
from tlt_core.cluster.policy_shard import PolicyShard, WeightDigest
from tlt_core.cluster.rendezvous import host_store, join_group
from tlt_core.cluster.start_replica import start_replica
from tlt_core.grpo.batch import TrainBatch
from tlt_core.grpo.passes import Key
from tlt_core.idle_training.coordinator import Action, Order, Progress
from tlt_core.idle_training.training import IdleTraining, IdleTrainingResult
from tlt_core.items.types import GenerationRequest, Rollout, SamplingParams
from tlt_core.machine.getting_on import got_on
from tlt_core.machine.memory import keep_few_products, keep_freed_memory, peak_bytes, require_gpu
from tlt_core.machine.precision import as_torch
from tlt_core.rollout.replica import NoReplica, Replica

_POLL_S = 0.02  # how often an idle worker asks whether rollout has ended
_REPORT_S = 0.5  # how often a busy worker reports its token count
_PULL_S = 0.02  # how often it asks for requests that an open phase may have again


class RequestFeed:
    """A worker's side of the dispatcher in one phase.  `pull`, `flush`, `ask` and `take` wait for it."""

    def __init__(self, dispatcher: Any, worker: int) -> None:
        self._dispatcher, self._worker = dispatcher, worker
        self._pushed: list[Any] = []
        self.trained = 0  # micro-steps of the drafter in this phase
        self._tokens, self._reported_s = 0, time.monotonic()
        self._pulled_s, self._more_later = 0.0, False
        self.exhausted = False  # no request is left for this worker, in this phase or for now

    def pull(self, wanted: int) -> Sequence[GenerationRequest]:
        if self.exhausted and not (self._more_later and time.monotonic() - self._pulled_s > _PULL_S):
            return ()
        requests, self.exhausted, self._more_later = ray.get(self._dispatcher.pull.remote(self._worker, wanted))
        self._pulled_s = time.monotonic()
        return requests

    def push(self, rollout: Rollout) -> None:
        self._pushed.append(self._dispatcher.push.remote(self._worker, rollout))

    def count(self, tokens: int) -> None:
        got_on()
        self._tokens += tokens
        if time.monotonic() - self._reported_s > _REPORT_S:
            self._report()

    def flush(self) -> None:
        """Report all tokens; wait until every response has arrived."""
        ray.get(self._pushed)
        self._report()

    def ask(self, event: Progress) -> Order:
        order: Order = ray.get(self._dispatcher.ask.remote(event))
        return order

    def take(self) -> OfferedPass:
        taken: OfferedPass = ray.get(self._dispatcher.take.remote())
        return taken

    def _report(self) -> None:
        self._dispatcher.report.remote(self._worker, self._tokens)
        self._reported_s = time.monotonic()


class Worker:
    """See the module docstring.  Methods are called by `WorkerGroup`."""

    def __init__(self, rank: int, world_size: int, spec: WorkerSpec) -> None:
        torch.set_num_threads(spec.threads)
        keep_freed_memory()
        keep_few_products()
        self._rank, self._world_size, self._spec = rank, world_size, spec
        self._device = torch.device(spec.device)
        self._engines = Engines(world_size, spec.rollout.workers_per_engine)
        self._replica: Replica = NoReplica()
        self._drafting = Drafting(None, rank=rank, hosts=self._engines.hosts)
        self._policy_shard: PolicyShard | None = None
        self._policy_version = 0
        self._store: dist.TCPStore | None = None  # of worker 0: where the group meets

    # ------------------------------------------------------------------------------------------ the process

    def unseen(self, files: Mapping[Path, int]) -> tuple[Path, ...]:
        """Which of the driver's files this node does not see, or sees with another size."""
        return tuple(path for path, size in files.items() if not path.is_file() or path.stat().st_size != size)

    def begin_heartbeat(self, dispatcher: Any, stacks: Path | None) -> None:
        begin_heartbeat(dispatcher, self._rank, stacks)

    def host_group(self, address: str) -> str:
        """Worker 0 alone: open the group's meeting point on its own node, and return it."""
        self._store, meeting_point = host_store(address, world_size=self._world_size)
        return meeting_point

    def join(self, meeting_point: str, own_address: str, backend: str) -> tuple[str, ...]:
        """Form the torch.distributed group of all workers.

        Returns this worker's GPUs, as CUDA_VISIBLE_DEVICES names them on its node."""
        join_group(
            meeting_point,
            own_address=own_address,
            rank=self._rank,
            world_size=self._world_size,
            backend=backend,
            store=self._store,
        )
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "") if self._device.type == "cuda" else ""
        return tuple(filter(None, visible.split(",")))

    def load(self, checkpoint: Path | None, policy_version: int, gpus: Sequence[str] = ()) -> None:
        """Build all parts from the start model, or from a checkpoint.  gpus: of the workers that share the engine."""
        spec = self._spec
        self._policy_version = policy_version
        if self._device.type == "cuda":
            require_gpu(spec.gpu_bytes, workers=spec.workers_per_gpu)  # the driver may not see it
        self._replica, self._drafting = start_replica(
            spec,
            checkpoint=checkpoint,
            policy_version=policy_version,
            rank=self._rank,
            engines=self._engines,
            gpus=gpus,
        )
        if spec.trainer is None:
            return
        self._make_room()
        self._policy_shard = PolicyShard(
            spec.trainer,
            model_dir=spec.model_dir,
            checkpoint=checkpoint,
            device=self._device,
            rank=self._rank,
            world_size=self._world_size,
        )
        if checkpoint is not None:
            self._replica.load_weights(self._policy_shard.trainer.weights(), policy_version=policy_version)

    def save(self, folder: Path) -> None:
        """Write this worker's part of a checkpoint."""
        self._policy.trainer.save(folder)
        self._drafting.save(folder, dtype=as_torch(self._spec.rollout.dtype))

    def leave(self) -> None:
        """Leave the torch.distributed group in step with the others; without the barrier gloo may abort at exit."""
        self._drafting.close()
        self._replica.close()
        if dist.is_initialized():
            dist.barrier()
            if self._policy_shard is not None:
                self._policy_shard.trainer.close()
            dist.destroy_process_group()

    # ------------------------------------------------------------------------------------------ rollout

    def serve_requests(self, dispatcher: Any, params: SamplingParams, step: int, is_training: bool) -> GenerateReport:
        """Decode what the dispatcher hands out; then train the drafter, or wait, until rollout has ended everywhere.

        is_training: these are the step's rollouts, from which the drafter learns and on which it is judged.
        """
        feed, drafting = RequestFeed(dispatcher, self._rank), self._drafting
        idle_training = drafting.idle_training if is_training else None
        streamed: list[Key] = []
        if idle_training is not None:
            idle_training.begin(step, self._policy_version)
        action = Action.DECODE
        while action is Action.DECODE:
            feed.exhausted = False
            while not feed.exhausted:  # a fair share may be empty for a moment while others hold more than theirs
                self._replica.decode(
                    feed.pull,
                    feed.push,
                    params,
                    on_tokens=feed.count,
                    on_round=drafting.observe if is_training else None,
                    on_captured=None if idle_training is None else idle_training.collect,
                    worker=self._rank,
                )
            idle = Progress(self._rank, feed.trained, time.time(), _has_data(idle_training))
            feed.flush()
            action = self._use_idle_time(idle, feed, idle_training, streamed)
        if idle_training is not None:
            until_s = time.monotonic() + self._spec.drafter.idle_training.after_rollout_s
            while idle_training.has_data and time.monotonic() < until_s:
                idle_training.micro_step()
            idle_training.end()
        return GenerateReport(
            **self._replica.report()._asdict(),
            idle_training=None if idle_training is None else idle_training.result(),
            suspended=drafting.suspended,
            streamed=tuple(streamed),
        )

    def train_while_waiting(self, dispatcher: Any) -> IdleTrainingResult | None:
        """Train the drafter, as in the idle time of a rollout, until the dispatcher ends the phase of waiting.

        None: of a worker that trains none."""
        feed, idle_training = RequestFeed(dispatcher, self._rank), self._drafting.idle_training
        idle = Progress(self._rank, 0, time.time(), _has_data(idle_training))
        self._use_idle_time(idle, feed, idle_training, [])
        return None if idle_training is None else idle_training.result()

    def _use_idle_time(
        self, idle: Progress, feed: RequestFeed, idle_training: IdleTraining | None, streamed: list[Key]
    ) -> Action:
        """Compute passes of the update or train the drafter, piece by piece, as ordered, else wait, until the order to
        stop or to decode.  A piece that has begun is finished.  streamed: gets the passes that were computed."""
        order = feed.ask(idle)
        while order.action not in (Action.STOP, Action.DECODE):
            if order.action is Action.STREAM:
                key, share = feed.take()
                self._policy.trainer.stream(share)
                streamed.append(key)
            elif idle_training is not None and order.action is Action.TRAIN:  # ordered only where there is data
                idle_training.micro_step()
                feed.trained += 1
                got_on()
            else:
                time.sleep(_POLL_S)
            order = feed.ask(Progress(self._rank, feed.trained, time.time(), _has_data(idle_training)))
        return order.action

    def call_drafting(self, method: str, *arguments: Any, **options: Any) -> Any:
        return getattr(self._drafting, method)(*arguments, **options)

    # ------------------------------------------------------------------------------------------ policy

    def update(self, steps: Sequence[TrainBatch]) -> UpdateReport:
        self._make_room()
        return self._policy.update(steps)._replace(memory_bytes=peak_bytes(self._device))

    def supervised_step(self, batch: TrainBatch) -> dict[str, float]:
        """One step of supervised training (the cold start)."""
        return self._policy.trainer.supervised_step(batch)

    def reference_logprobs(self, batch: TrainBatch) -> Tensor:
        self._make_room()
        return self._policy.reference_logprobs(batch)

    def publish(self, policy_version: int) -> tuple[int, int]:
        """Load the trained weights into the rollout replica.

        Returns the version and a digest of what was loaded; both must be the same on all workers.
        """
        digest = WeightDigest()
        if self._device.type == "cuda" and self._spec.release_memory:
            torch.cuda.empty_cache()  # what the update took; the engine wakes up in it
            self._meet()
        self._replica.load_weights(digest.through(self._policy.trainer.weights()), policy_version=policy_version)
        self._policy_version = policy_version
        return policy_version, digest.value

    def export(self, out_dir: Path, tokenizer_from: Path, dtype: str) -> None:
        self._policy.export(out_dir, tokenizer_from=tokenizer_from, dtype=dtype)

    def _make_room(self) -> None:
        """Release the rollout's memory where the configuration says so."""
        if self._spec.release_memory:
            self._replica.release_memory()
        self._meet()

    def _meet(self) -> None:
        """Wait for the other workers where an engine has memory on the GPUs of several."""
        if self._engines.workers_each > 1:
            dist.all_reduce(torch.zeros(()))  # on the CPU, where it waits for as long as an engine may need to start

    @property
    def _policy(self) -> PolicyShard:
        assert self._policy_shard is not None, "load() comes first, with a trainer"
        return self._policy_shard


def _has_data(idle_training: IdleTraining | None) -> bool:
    return idle_training is not None and idle_training.has_data
