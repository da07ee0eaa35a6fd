"""Starts vLLM as a worker's replica, as the configuration says."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from conf.rollout import RolloutConfig
from tlt_core.machine.precision import as_torch
from tlt_core.model.config import DecoderConfig
from tlt_core.model.edge_weights import EdgeWeights
from tlt_core.model.load import hf_tensors, load_config
from tlt_core.rollout.vllm.client import VllmRollout
from tlt_core.rollout.vllm.drafts import tlt_settings, vllm_speculation, vllm_strategies

# vLLM stops drafting for the whole batch while the drafts of any request could pass the length limit.
_ROOM = 32


class VllmSpec(NamedTuple):
    """Where vLLM is, and where its workers keep their files."""

    python: Path  # interpreter of its environment, on every node
    folder: Path  # a folder below it for each worker
    leave_bytes: int = 0  # of a GPU, to everything else that runs there


def start_vllm(
    spec: VllmSpec,
    cfg: RolloutConfig,
    *,
    model_dir: Path,
    max_len: int,
    threads: int,
    rank: int,
    seed: int,
    policy_version: int,
    edge_weights: EdgeWeights | None = None,
    sleeps: bool = False,
    devices: Sequence[str] = (),
) -> VllmRollout:
    """A running engine with the weights of `model_dir`.

    edge_weights: kept up to date with the policy, and hidden states are kept; None: neither.  sleeps: `release_memory`
    is going to be called.  devices: see `VllmRollout`.  Raises VllmError, VllmUnusable.
    """
    model, strategies = load_config(model_dir), vllm_strategies(cfg.speculation)
    max_len = max(max_len, min(max_len + _ROOM, model.max_position_embeddings))

    def for_vllm(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        weights = weights if edge_weights is None else edge_weights.through(weights)
        return hf_tensors(weights, model, dtype=as_torch(cfg.dtype))

    capture_mb = _capture_mb(cfg, model, max_len) if edge_weights else 0
    settings = {
        "model": str(model_dir),
        "dtype": cfg.dtype,
        "max_len": max_len,
        "max_live": cfg.max_live_requests,
        "kv_cache_mb": cfg.vllm.kv_cache_mb,  # None: `memory_fraction` of a GPU, or what `leave_bytes` for others leave
        "memory_fraction": cfg.kv_memory_fraction,
        "leave_bytes": spec.leave_bytes,
        "eager": cfg.vllm.eager,
        "sleeps": sleeps,
        "tensor_parallel": cfg.vllm.tensor_parallel,
        "speculative": vllm_speculation(cfg.speculation, strategies),
        "tlt": tlt_settings(cfg.speculation, strategies, capture_mb=capture_mb),
        "folder": str(spec.folder / f"worker_{rank}"),
        "seed": seed,
        "version": policy_version,
    }
    return VllmRollout(spec.python, settings, for_vllm=for_vllm, threads=threads, devices=devices)


def _capture_mb(cfg: RolloutConfig, model: DecoderConfig, max_len: int) -> int:
    """Room for the hidden states of all live requests, and of as many that have ended and are read as donors."""
    taps = 3  # of an EAGLE-3 drafter
    each = max_len * ((taps + 1) * model.hidden_size * as_torch(cfg.dtype).itemsize + 4)
    return 1 + (2 * cfg.max_live_requests * each >> 20)
