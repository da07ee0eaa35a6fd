"""Starts vLLM as a worker's replica, as the configuration says."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from conf.rollout import RolloutConfig
from tlt_core.machine.precision import as_torch
from tlt_core.model.load import load_config, save_hf
from tlt_core.rollout import build
from tlt_core.rollout.vllm.client import VllmRollout, vllm_speculation

# vLLM stops drafting for the whole batch while the drafts of any request could pass the length limit.
_ROOM = 32


class VllmSpec(NamedTuple):
    """Where vLLM is, and where its workers keep their files."""

    python: Path  # interpreter of its environment, on every node
    folder: Path  # a folder below it for each worker


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
) -> VllmRollout:
    """A running engine with the weights of `model_dir`.  Raises VllmError, VllmUnusable."""
    model, speculation = load_config(model_dir), cfg.speculation

    def write_policy(weights: Iterable[tuple[str, Tensor]], folder: Path) -> None:
        save_hf(weights, model, folder, tokenizer_from=model_dir, dtype=as_torch(cfg.dtype))

    engine = VllmRollout(
        spec.python,
        model_dir,
        folder=spec.folder / f"worker_{rank}",
        write_policy=write_policy,
        dtype=cfg.dtype,
        max_len=max(max_len, min(max_len + _ROOM, model.max_position_embeddings)),
        max_live=cfg.max_live_requests,
        threads=threads,
        kv_cache_mb=cfg.vllm.kv_cache_mb,
        eager=cfg.vllm.eager,
        speculative=vllm_speculation(speculation, build.menu_of(speculation)[0], max_live=cfg.max_live_requests),
        seed=seed,
        policy_version=policy_version,
    )
    return engine.__enter__()
