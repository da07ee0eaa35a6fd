"""The one place that chooses a worker's rollout engine: ours, with drafters and a tuner, or vLLM."""

from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from conf.rollout import SpeculationConfig
from tlt_core.cluster.drafting import Drafting, newest_drafter
from tlt_core.cluster.engines import Engines
from tlt_core.cluster.messages import WorkerSpec
from tlt_core.machine.precision import as_torch
from tlt_core.model.edge_weights import EdgeWeights
from tlt_core.model.load import load_decoder
from tlt_core.rollout import build
from tlt_core.rollout.drafts import BuiltinDrafts, Drafts
from tlt_core.rollout.replica import BuiltinReplica, NoReplica, Replica
from tlt_core.rollout.vllm.drafts import VllmDrafts
from tlt_core.rollout.vllm.replica import start_vllm


def start_replica(
    spec: WorkerSpec,
    *,
    checkpoint: Path | None,
    policy_version: int,
    rank: int,
    engines: Engines,
    gpus: Sequence[str] = (),
) -> tuple[Replica, Drafting]:
    """A replica with the weights of `spec.model_dir`, and the newest drafter.  For all workers together.

    checkpoint: where tuner and drafter go on from.  gpus: of the workers that share the engine.
    Raises ModelError, VllmError, VllmUnusable.
    """
    # Of the workers that draft, for which all workers have to come.
    together = None if engines.workers_each == 1 else dist.new_group(list(engines.hosts))
    if not (spec.decodes and engines.is_host(rank)):
        return NoReplica(), Drafting(None, rank=rank, hosts=engines.hosts, group=together)
    speculation = newest_drafter(spec.rollout.speculation, checkpoint)
    start = _START[spec.rollout.engine]
    replica, drafts = start(spec, speculation, policy_version=policy_version, rank=rank, gpus=gpus)
    drafting = Drafting(drafts, rank=rank, hosts=engines.hosts, group=together)
    drafting.prepare(checkpoint)
    if spec.idle_training_dir is not None:
        drafting.train_in_idle_time(
            spec.drafter,
            speculation,
            temperature=spec.rollout.temperature,
            compute_dtype=as_torch(spec.rollout.dtype if spec.trainer is None else spec.trainer.update.dtype),
            folder=spec.idle_training_dir,
            resume=checkpoint is not None,
        )
    return replica, drafting


def _vllm(
    spec: WorkerSpec, speculation: SpeculationConfig, *, policy_version: int, rank: int, gpus: Sequence[str]
) -> tuple[Replica, Drafts | None]:
    assert spec.vllm is not None, "the driver names vLLM's environment where the configuration asks for vLLM"
    edge_weights = None
    if spec.idle_training_dir is not None:
        edge_weights = EdgeWeights.load(spec.model_dir, dtype=as_torch(spec.rollout.dtype), device=spec.device)
    replica = start_vllm(
        spec.vllm,
        spec.rollout.model_copy(update={"speculation": speculation}),
        edge_weights=edge_weights,
        model_dir=spec.model_dir,
        max_len=spec.max_len,
        threads=spec.threads,
        rank=rank,
        seed=spec.seed,
        policy_version=policy_version,
        sleeps=spec.release_memory,
        devices=gpus,
    )
    if speculation.policy == "off":
        return replica, None
    return replica, VllmDrafts(replica.ask, speculation, edge_weights, folder=replica.folder)


def _own(
    spec: WorkerSpec, speculation: SpeculationConfig, *, policy_version: int, rank: int, gpus: Sequence[str]
) -> tuple[Replica, Drafts | None]:
    engine = build.make_engine(
        load_decoder(spec.model_dir, dtype=as_torch(spec.rollout.dtype), device=spec.device),
        speculation,
        max_live=spec.rollout.max_live_requests,
        max_len=spec.max_len,
        seed=spec.seed + rank,
        capture=spec.idle_training_dir is not None,
        kv_memory_fraction=spec.rollout.kv_memory_fraction,
    )
    replica = BuiltinReplica(engine, policy_version=policy_version)
    return replica, None if engine.speculation is None else BuiltinDrafts(engine, engine.speculation)


_START = {"auto": _own, "builtin": _own, "vllm": _vllm}
