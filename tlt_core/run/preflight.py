"""Quick checks before long work: folders, workers, data, reward functions, model and drafter, memory, vLLM.

A wrong reward path, a truncated weight file or a full disk is reported now, not after the first rollout.
"""

import math
import re
from pathlib import Path

from safetensors import SafetensorError, safe_open

from conf.data import FileData
from conf.model import RandomModel
from conf.run import RunConfig
from tlt_core.data import file_questions
from tlt_core.drafter.eagle3.files import check_eagle3
from tlt_core.grpo.reward import check_reward_functions
from tlt_core.machine import precision
from tlt_core.machine.disk import check_space, check_writable
from tlt_core.machine.memory import gpu_bytes, warn_of_limits
from tlt_core.machine.processors import check_workers
from tlt_core.model.config import DecoderConfig, ModelError
from tlt_core.model.embedded import EMBEDDED_NAME
from tlt_core.model.load import load_config, resolve
from tlt_core.model.shapes import shape_of
from tlt_core.rollout.vllm.client import require_vllm
from tlt_core.rollout.vllm.environment import vllm_python
from tlt_core.run import memory_plan, step_files

_CHECKPOINT_BYTES = 12  # a parameter's fp32 master weight and its two moments


def check_run(cfg: RunConfig) -> None:
    """All checks that need no download.

    A local model folder is checked here; a hub name or the embedded model after it was fetched (`check_model`).

    Raises FolderError, TooManyWorkers, DataError, ModelError, RewardError, SpaceError, VllmUnusable.
    """
    check_writable(cfg.run_dir)
    check_workers(cfg.cluster)
    warn_of_limits()
    if isinstance(cfg.data, FileData):
        file_questions.check(cfg.data)
    if isinstance(cfg.model, RandomModel) or cfg.model.path == EMBEDDED_NAME:
        shape = shape_of(cfg.model)
        assert shape is not None, "the shapes of these are known"
        check_drafter(cfg, shape)
    elif not _is_fetched(cfg.model.path):
        check_model(cfg, resolve(cfg.model.path))
    if cfg.rollout.engine == "vllm":
        require_vllm(vllm_python(), cfg.cluster.device)
    check_reward_functions(cfg.reward)  # last: it starts a process


def check_drafter(cfg: RunConfig, model: DecoderConfig) -> None:
    """Does the run's first drafter fit the model?  Raises ModelError."""
    speculation = cfg.rollout.speculation
    if speculation.policy == "off" or speculation.drafter_path is None:
        return
    try:
        check_eagle3(Path(speculation.drafter_path), model)
    except ModelError as error:
        raise ModelError(
            f"rollout.speculation.drafter_path={speculation.drafter_path!r}: {error}.  Make one with 'tlt warmup', or "
            "leave rollout.speculation.drafter_path out"
        ) from None


def _is_fetched(path: str) -> bool:
    """Is it the embedded model, or a name on the hub?"""
    hub_name = re.fullmatch(r"\w[\w.-]*/[\w.-]+(@[\w.-]+)?", path) is not None
    return path == EMBEDDED_NAME or (hub_name and not Path(path).is_dir())


def check_model(cfg: RunConfig, folder: Path) -> None:
    """Is the folder complete, does the run fit into a GPU of this machine, do its files fit on the disk?

    Raises ModelError, MemoryPlanError, SpaceError."""
    config = load_config(folder)
    check_drafter(cfg, config)
    check_division(cfg.rollout.workers_per_engine, config)
    gpu = gpu_bytes() if cfg.cluster.device == "cuda" else None
    if gpu is not None:
        settled = cfg.with_dtypes(**precision.decide(cfg)._asdict())
        memory_plan.check(memory_plan.memory_plan(settled, config), cfg, device_bytes=gpu)
    needed = count_parameters(folder) * _CHECKPOINT_BYTES
    if cfg.update.lora.enabled:
        needed = needed // 10  # adapters are a few percent of the weights
    copies = cfg.checkpoint.keep_last + cfg.checkpoint.keep_best + 1  # one is being written
    policy = count_parameters(folder) * 4
    check_space(cfg.run_dir, needed_bytes=needed * copies + policy + step_files.needed_bytes(cfg))


def check_division(parts: int, model: DecoderConfig) -> None:
    """Can vLLM divide the model among so many workers?  Raises ModelError."""
    heads, kv, inner = model.num_heads, model.num_kv_heads, model.intermediate_size
    fit = [n for n in range(1, heads + 1) if not (heads % n or inner % n or (kv % n and n % kv))]
    if parts not in fit:
        raise ModelError(
            f"rollout.vllm.tensor_parallel={parts} does not divide the model's {heads} attention heads, {kv} heads of "
            f"keys and values and {inner} channels of the feed-forward network: set it to one of {fit}"
        )


def count_parameters(folder: Path) -> int:
    """Parameters of a Hugging Face folder, from the headers of its weight files.  Raises ModelError."""
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ModelError(f"{folder} holds no .safetensors file; the checkpoint is incomplete or in another format")
    total = 0
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                total += sum(math.prod(file.get_slice(key).get_shape()) for key in file.keys())  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} is damaged ({error}); download or copy it again") from None
    return total
