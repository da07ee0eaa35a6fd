"""The worker group: N Ray actors and the dispatcher that feeds them, driven by one controller.

    driver --- serve_requests / update / publish / save ---> Worker 0 .. N-1   (Ray actors, one processor each)
       \\--- begin / drain ---> Dispatcher <--- pull / push --- workers

A worker that dies fails the phase at once with its own traceback: the rest of the group is killed, so nobody waits in
a collective for a dead peer.  One that hangs: see `watch`.
"""

import contextlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from conf.system import ClusterConfig
from tlt_core.cluster.dispatcher import Dispatcher, Drained, OfferedPass
from tlt_core.cluster.drafting import DrafterPublished
from tlt_core.cluster.engines import Engines
from tlt_core.cluster.messages import GenerateReport, UpdateReport, WorkerSpec
from tlt_core.cluster.placement import expected_files, probe_file, require_room, require_seen, reserve, start_ray
from tlt_core.cluster.rendezvous import LOOPBACK, backend_of
from tlt_core.cluster.watch import Watch, dead_processes, own_error
from tlt_core.cluster.worker import Worker
from tlt_core.grpo.batch import TrainBatch
from tlt_core.idle_training.comparison import Comparison
from tlt_core.idle_training.coordinator import IdleTrainingSettings, PhaseReport
from tlt_core.idle_training.training import IdleTrainingResult
from tlt_core.items.types import GenerationRequest, SamplingParams
from tlt_core.machine.precision import as_torch

log = logging.getLogger(__name__)

_POLL_S = 0.02  # how often the driver checks whether it must still wait
_GATHER_S = 0.1  # how often it gathers finished rollouts
_WAKE_S = 1.0  # how often it looks after workers that it waits for
_DISPATCHER_S = 120.0  # longest answer; a busy machine takes seconds to start it
_RESUME = "Start the same command again to resume from the newest checkpoint."


class WorkerDied(RuntimeError):
    """A worker failed.  The text holds its own traceback; the run can be resumed from its newest checkpoint."""


class Generated(NamedTuple):
    reports: list[GenerateReport]  # by rank
    phase: PhaseReport


class Waited(NamedTuple):
    results: list[IdleTrainingResult]  # of their training, by rank; a worker that trains none is missing
    phase: PhaseReport


class WorkerGroup:
    """Context manager: starts the actors, ends them."""

    def __init__(self, cluster: ClusterConfig, spec: WorkerSpec, *, shared: Path | None = None) -> None:
        """shared: folder that workers write for the driver and each other; every node must see it.

        Raises ClusterError when the cluster has no room for the workers, or their nodes do not see the same files.
        Whatever is raised, nothing that was started is left.
        """
        self.num_workers = cluster.num_workers
        self.engines = Engines(cluster.num_workers, spec.rollout.workers_per_engine)
        self._rollout_dtype = spec.rollout.dtype
        self._workers: list[Any] = []
        self._gpus: list[tuple[str, ...]] = [()] * cluster.num_workers  # that a lone worker sees anyway
        start_ray(cluster)
        try:
            self._start(cluster, spec, shared)
        except BaseException:
            self.kill()
            raise

    def _start(self, cluster: ClusterConfig, spec: WorkerSpec, shared: Path | None) -> None:
        require_room(cluster, self.engines.workers_each)
        self._placement = reserve(cluster, self.engines.workers_each)
        actor = ray.remote(num_cpus=cluster.threads_per_worker, num_gpus=cluster.gpu_share)(Worker)
        self._workers = [
            actor.options(name=f"worker-{rank}-{os.getpid()}", scheduling_strategy=self._placement.worker(rank)).remote(
                rank, self.num_workers, spec
            )
            for rank in range(self.num_workers)
        ]
        dispatcher = ray.remote(num_cpus=0)(Dispatcher)
        here = NodeAffinitySchedulingStrategy(self._placement.driver.id, soft=False)
        self._dispatcher: Any = dispatcher.options(scheduling_strategy=here).remote()
        self._watch = Watch(cluster, self._placement, self._ask_dispatcher, shared=shared)
        self._watch.begin_heartbeats(self._workers, self._dispatcher)
        if not self._placement.is_local:
            self._require_shared_folders(spec, shared)
        if self.num_workers > 1 or (spec.trainer is not None and spec.trainer.update.backend.kind == "deepspeed"):
            backend = backend_of(spec.device, shares_gpus=cluster.shares_gpus)
            addresses = [LOOPBACK if self._placement.is_local else node.address for node in self._placement.nodes]
            (meeting_point,) = self._wait_for([self._workers[0].host_group.remote(addresses[0])], "join")
            self._gpus = self._on_each("join", [(meeting_point, address, backend) for address in addresses])

    def _require_shared_folders(self, spec: WorkerSpec, shared: Path | None) -> None:
        drafter = spec.rollout.speculation.drafter_path
        files = expected_files([spec.model_dir, *([] if drafter is None else [Path(drafter)])])
        with contextlib.ExitStack() as stack:
            if shared is not None:
                files |= stack.enter_context(probe_file(shared.resolve()))
            missing = self._on_all("unseen", files)
        require_seen(missing, self._placement)

    def __enter__(self) -> "WorkerGroup":
        return self

    def __exit__(self, error_type: type | None, *_: object) -> None:
        if error_type is None and ray.is_initialized():  # else the group was killed
            self._on_all("leave")
        self.kill()

    def kill(self) -> None:
        """End actors, and Ray where it is ours, at once.  A second call does nothing."""
        if not ray.is_initialized():  # ray.kill would start a new Ray
            return
        for worker in self._workers:
            ray.kill(worker)
        ray.shutdown()

    def load(self, checkpoint: Path | None, policy_version: int) -> None:
        shared = [self.engines.workers_of(rank) for rank in range(self.num_workers)]
        gpus = [tuple(gpu for rank in ranks for gpu in self._gpus[rank]) for ranks in shared]
        self._on_each("load", [(checkpoint, policy_version, of_engine) for of_engine in gpus])

    # ------------------------------------------------------------------------------------------ phases

    def run_phase(
        self,
        groups: Sequence[Sequence[GenerationRequest]],
        params: SamplingParams,
        *,
        dispatch: str,
        on_progress: Callable[[Drained], None],
        step: int = 0,
        is_training: bool = False,
        waits: Callable[[], bool] | None = None,
        idle_training: IdleTrainingSettings = IdleTrainingSettings(enabled=False),  # noqa: B008 (immutable)
    ) -> Generated:
        """Sample every request; `on_progress` gets what finished since its last call, several times a second.

        is_training: these are the rollouts of RL step `step`.  waits: of an open phase, which `extend` may lengthen and
        ends; whether it waits for something else than its workers.  idle_training: when idle workers train the
        drafter.
        """
        self._ask_dispatcher(
            "begin",
            groups,
            engines=self.engines,
            dispatch=dispatch,
            step=step,
            is_open=waits is not None,
            idle_training=idle_training,
        )
        calls = [w.serve_requests.remote(self._dispatcher, params, step, is_training) for w in self._workers]
        reports = self._gather(
            calls,
            "rollout",
            lambda: on_progress(self._ask_dispatcher("drain")),
            every_s=_GATHER_S if waits is None else _POLL_S,
            may_idle=waits or (lambda: False),
        )
        return Generated(reports, self._ask_dispatcher("phase"))

    def extend(self, requests: Sequence[tuple[GenerationRequest, int]], *, ends: bool) -> None:
        """Further requests of an open phase, each with the worker that should have it.  ends: all have finished."""
        self._ask_dispatcher("extend", requests)
        if ends:
            self._ask_dispatcher("end")

    def offer(self, passes: Sequence[OfferedPass]) -> None:
        """Passes of the update that workers may compute when they are idle; only while `run_phase` runs."""
        self._ask_dispatcher("offer", passes)

    def train_while(self, waiting: Callable[[], bool], *, step: int, idle_training: IdleTrainingSettings) -> Waited:
        """Have all workers train the drafter, as idle ones do during a rollout, until `waiting` is false."""

        def end_when_there() -> None:
            if not waiting():
                self._ask_dispatcher("end")

        self._ask_dispatcher("begin", [], engines=self.engines, dispatch="pull", step=step, idle_training=idle_training)
        calls = [w.train_while_waiting.remote(self._dispatcher) for w in self._workers]
        results = self._gather(calls, "waiting for scores", end_when_there, every_s=_POLL_S, may_idle=lambda: True)
        return Waited([result for result in results if result is not None], self._ask_dispatcher("phase"))

    def _gather(
        self, calls: Sequence[Any], what: str, look: Callable[[], None], *, every_s: float, may_idle: Callable[[], bool]
    ) -> list[Any]:
        """The workers' reports by rank.  look: called now and then, and at the end.  what, may_idle: see `Watch`."""
        ranks, pending = {call: rank for rank, call in enumerate(calls)}, list(calls)
        self._watch.begin(what)
        while pending:
            done, pending = ray.wait(pending, num_returns=len(pending), timeout=every_s)
            self._get(done)
            look()
            self._look_after([ranks[call] for call in pending], may_idle=may_idle())
        return self._get(calls)

    def _ask_dispatcher(self, method: str, *arguments: Any, **options: Any) -> Any:
        return self._get([getattr(self._dispatcher, method).remote(*arguments, **options)], within_s=_DISPATCHER_S)[0]

    # ------------------------------------------------------------------------------------------ drafter

    def publish_drafter(self, shares: Sequence[float], *, measured: Comparison | None) -> list[DrafterPublished]:
        """See `Drafting.publish`."""
        return self._on_engines("publish", tuple(shares), measured=measured)

    def refuse_drafter(self) -> None:
        self._on_engines("refuse")

    def export_drafter(self, out_dir: Path) -> None:
        """Write the drafter in use as a folder that vLLM and SGLang load.  Every worker has the same."""
        call = self._workers[0].call_drafting.remote("export", out_dir, dtype=as_torch(self._rollout_dtype))
        self._wait_for([call], "export of the drafter")

    # ------------------------------------------------------------------------------------------ policy

    def update(self, shares: Sequence[Sequence[TrainBatch]]) -> list[UpdateReport]:
        """Make one RL step's optimizer steps: `shares[i][w]` is worker w's part of step i."""
        return self._on_each("update", [([step[w] for step in shares],) for w in range(self.num_workers)])

    def supervised_step(self, shares: Sequence[TrainBatch]) -> dict[str, float]:
        """Make one supervised step; `shares[w]` is worker w's part."""
        return self._on_each("supervised_step", [(share,) for share in shares])[0]

    def reference_logprobs(self, shares: Sequence[TrainBatch]) -> list[Any]:
        """Log-probs of each worker's share under the model that RL started from."""
        return self._on_each("reference_logprobs", [(share,) for share in shares])

    def publish(self, policy_version: int) -> None:
        """Load the new weights into all rollout replicas.  Raises WorkerDied when these differ afterwards."""
        published = self._on_all("publish", policy_version)
        common = Counter(published).most_common(1)[0][0]  # in a tie, the first one counts as right
        wrong = [rank for rank, own in enumerate(published) if own != common]
        if wrong:
            self.kill()
            raise WorkerDied(
                f"after publishing policy {policy_version}, workers {wrong} hold other weights than the rest "
                f"({published}, version and digest).  {_RESUME}"
            )

    def save(self, folder: Path) -> None:
        self._on_all("save", folder)

    def export(self, out_dir: Path, *, tokenizer_from: Path, dtype: str) -> None:
        self._on_all("export", out_dir, tokenizer_from, dtype)

    # ------------------------------------------------------------------------------------------ calls

    def _on_all(self, method: str, *arguments: Any, **options: Any) -> list[Any]:
        return self._wait_for([getattr(w, method).remote(*arguments, **options) for w in self._workers], method)

    def _on_engines(self, method: str, *arguments: Any, **options: Any) -> list[Any]:
        """Call a method of `Drafting` of every worker that runs an engine."""
        hosts = self.engines.hosts
        calls = [self._workers[rank].call_drafting.remote(method, *arguments, **options) for rank in hosts]
        return self._wait_for(calls, method, by=hosts)

    def _on_each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        calls = [getattr(w, method).remote(*a) for w, a in zip(self._workers, arguments, strict=True)]
        return self._wait_for(calls, method)

    def _wait_for(self, calls: Sequence[Any], what: str, *, by: Sequence[int] | None = None) -> list[Any]:
        """Answers of the workers `by`, None for all or the first ones.  The first call that fails ends the group."""
        self._watch.begin(what)
        ranks, pending = dict(zip(calls, range(len(calls)) if by is None else by, strict=True)), list(calls)
        while pending:
            done, pending = ray.wait(pending, num_returns=1, timeout=_WAKE_S)
            self._get(done)
            self._look_after([ranks[call] for call in pending])
        return self._get(calls)

    def _look_after(self, ranks: Collection[int], *, may_idle: bool = False) -> None:
        """Raises WorkerDied when a worker that is waited for is given up."""
        problem = self._watch.look(ranks, may_idle=may_idle)
        if problem is not None:
            self._watch.kill_silent()
            self.kill()
            raise WorkerDied(f"{problem}.  {_RESUME}")

    def _get(self, calls: Sequence[Any], *, within_s: float | None = None) -> list[Any]:
        try:
            return ray.get(list(calls), timeout=within_s)
        except GetTimeoutError as error:
            self.kill()
            raise WorkerDied(f"The dispatcher, a process here, is silent for {within_s:.0f} s.  {_RESUME}") from error
        except RayError as error:  # the call raised; or: actor died, out of memory, node lost
            try:
                failure = own_error(error) or self._post_mortem(error)
            finally:
                self.kill()
            raise failure from error

    def _post_mortem(self, error: RayError) -> WorkerDied:
        """Say which worker failed.  Logged at once, since the driver may end together with Ray."""
        if lost := self._watch.lost_ray():
            return WorkerDied(f"{lost}.  {_RESUME}")
        # Its peers in a collective fail before its own call does.
        dead = dead_processes(self._workers, self._placement.nodes, self._dispatcher)
        which = "; ".join(dead) or "it is not known which"
        text = f"A worker process ended unexpectedly ({which}): it was killed, ran out of memory, or its node failed.  "
        if not isinstance(error, RayTaskError):
            text += f"{_RESUME}  ({error})"
        else:
            text = f"{text}{_RESUME}" if dead else f"A worker failed with:\n{error}"
        log.error("%s", text)
        return WorkerDied(text)
