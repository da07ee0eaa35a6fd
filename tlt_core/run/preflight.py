"""Quick checks before long work: folders, workers, data, reward functions, model and drafter, memory, vLLM.

A wrong reward path, a truncated weight file or a full disk is reported now, not after the first rollout.
"""

import difflib
import math
import re
from dataclasses import replace
from pathlib import Path

from safetensors import SafetensorError, safe_open

from conf.data import FileData, GymData
from conf.load import ConfigError
from conf.model import RandomModel
from conf.run import RunConfig
from tlt_core.data import file_questions
from tlt_core.data.chat import encode_turn
from tlt_core.drafter.eagle3.files import check_eagle3
from tlt_core.drafter.eagle3.model import default_taps
from tlt_core.grpo.lora import require_targets
from tlt_core.grpo.reward import check_reward_functions
from tlt_core.machine import precision
from tlt_core.machine.disk import check_space, check_writable
from tlt_core.machine.memory import gpu_bytes, warn_of_limits
from tlt_core.machine.processors import check_workers
from tlt_core.model.config import DecoderConfig, ModelError
from tlt_core.model.embedded import EMBEDDED_NAME
from tlt_core.model.load import empty_decoder, load_config, load_tokenizer, resolve
from tlt_core.model.shapes import shape_of
from tlt_core.rollout.engines import ENGINES
from tlt_core.run import memory_plan, step_files
from tlt_core.run.step_metrics import validation_metrics

_CHECKPOINT_BYTES = 12  # a parameter's fp32 master weight and its two moments
_HUB_NAME = r"\w[\w.-]*/[\w.-]+(@[\w.-]+)?"


def check_run(cfg: RunConfig) -> None:
    """All checks that need no download.

    A local model folder is checked here; a hub name or the embedded model after it was fetched (`check_model`).

    Raises FolderError, TooManyWorkers, DataError, ModelError, RewardError, SpaceError, ConfigError, VllmUnusable.
    """
    check_best_metric(cfg)
    check_writable(cfg.run_dir)
    check_workers(cfg.cluster)
    warn_of_limits()
    if isinstance(cfg.data, FileData):
        file_questions.check(cfg.data)
    if isinstance(cfg.model, RandomModel) or cfg.model.path == EMBEDDED_NAME:
        shape = shape_of(cfg.model)
        assert shape is not None, "the shapes of these are known"
        check_shape(cfg, shape)
    elif Path(cfg.model.path).is_dir() or not re.fullmatch(_HUB_NAME, cfg.model.path):
        check_model(cfg, resolve(cfg.model.path))
    if cfg.rollout.engine in ENGINES:  # not where `auto` is to be settled
        ENGINES[cfg.rollout.engine].check_install(cfg.cluster.device)
    environment = cfg.rollout.environment
    check_reward_functions(cfg.reward, environment=environment.path if environment else "")  # last: it starts a process


def check_best_metric(cfg: RunConfig) -> None:
    """Is it a figure of this run's validation?  Else no checkpoint would ever be ranked.  Raises ConfigError."""
    name, k = cfg.checkpoint.best_metric, cfg.evaluation.num_samples
    named = name.split("/")[1:2] or [file_questions.TASK]  # rows may name their data source, which is the task then
    tasks = [task.name for task in cfg.data.tasks] if isinstance(cfg.data, GymData) else named
    given = validation_metrics(tasks, samples=k)
    if name in given:
        return
    close = difflib.get_close_matches(name, given, n=1, cutoff=0.8)
    meant = f"did you mean {close[0]!r}" if close else f"choose one of {', '.join(given)}"
    sampled = "" if k else " (mean_at_K and pass_at_K need evaluation.num_samples=K)"
    raise ConfigError(
        f"checkpoint.best_metric={name!r} is no figure of this run's validation{sampled}, so no checkpoint would be "
        f"ranked: {meant}"
    )


def check_shape(cfg: RunConfig, model: DecoderConfig) -> None:
    """Can the run's drafter, adapters and longest response go with a model of this shape?  Raises ModelError."""
    check_drafter(cfg, model)
    check_context(cfg, model, longest_prompt=1)
    if cfg.needs_first_drafter:
        default_taps(model.num_layers)
    if model.foreign:
        check_foreign(cfg, model)
    if cfg.update.lora.enabled:
        require_targets(empty_decoder(model if model.foreign else replace(model, num_layers=1)), cfg.update.lora)


def check_foreign(cfg: RunConfig, model: DecoderConfig) -> None:
    """Can the run go on with a model that transformers computes?  Raises ModelError."""
    cannot = {
        "rollout.engine='vllm' (set it to builtin)": cfg.rollout.engine == "vllm",
        "update.activation_checkpointing=true (set it to false)": cfg.update.activation_checkpointing,
        "update.backend.kind='deepspeed' (set it to torch)": cfg.update.backend.kind == "deepspeed",
    }
    for setting in (setting for setting, is_set in cannot.items() if is_set):
        raise ModelError(f"{setting}: not for {model.family} models, which transformers' own layers compute")


def check_context(cfg: RunConfig, model: DecoderConfig, *, longest_prompt: int) -> None:
    """Has the model learnt positions for the longest prompt with the longest response?  Raises ModelError."""
    room = model.max_position_embeddings - longest_prompt
    limits = {
        "rollout": cfg.rollout.max_new_tokens,
        "evaluation": cfg.evaluation.max_new_tokens,
        "retrain": cfg.retrain.max_new_tokens,
    }
    for section, limit in limits.items():
        if limit is not None and limit > room:
            prompt = f" after a prompt of {longest_prompt} tokens" if longest_prompt > 1 else ""
            shorten = ", or drop long prompts with rollout.max_prompt_tokens" if longest_prompt > 1 else ""
            raise ModelError(
                f"{section}.max_new_tokens={limit}{prompt} exceeds the model's context of "
                f"{model.max_position_embeddings} positions (max_position_embeddings), beyond which its text is "
                f"garbage: set it to {max(1, room)} or lower{shorten}"
            )


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


def check_model(cfg: RunConfig, folder: Path) -> None:
    """Is the folder complete, does the run fit into a GPU of this machine, do its files fit on the disk?

    Raises ModelError, MemoryPlanError, SpaceError; DataError where an environment finds no turns in the chat template.
    """
    config = load_config(folder)
    check_shape(cfg, config)
    if cfg.rollout.environment is not None:
        encode_turn(load_tokenizer(folder), "", ended_by=0, template_kwargs=cfg.data.chat_template_kwargs)
    unknown = [token for token in cfg.rollout.stop_token_ids if not 0 <= token < config.vocab_size]
    if unknown:
        raise ModelError(
            f"rollout.stop_token_ids={unknown}: the model has tokens 0 to {config.vocab_size - 1}; take the ids from "
            "its tokenizer"
        )
    check_division(cfg.rollout.workers_per_engine, config)
    gpu = gpu_bytes() if cfg.cluster.device == "cuda" else None
    if gpu is not None:
        settled = cfg.with_dtypes(**precision.decide(cfg)._asdict())
        memory_plan.check(memory_plan.memory_plan(settled, config), cfg, device_bytes=gpu)
    parameters = count_parameters(folder)
    needed = parameters * _CHECKPOINT_BYTES
    if cfg.update.lora.enabled:
        needed = needed // 10  # adapters are a few percent of the weights
    copies = cfg.checkpoint.keep_last + cfg.checkpoint.keep_best + 1  # one is being written
    check_space(cfg.run_dir, needed_bytes=needed * copies + parameters * 4 + step_files.needed_bytes(cfg))


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
