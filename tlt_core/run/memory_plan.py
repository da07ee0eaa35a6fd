"""Where a worker's memory goes, phase by phase, by arithmetic: before anything is downloaded or loaded.

    configuration, shape of the model --> bytes by owner at load, rollout, update and save --> what to change

Device is the worker's GPU, or its part of a CPU's memory; host is what a worker on a GPU keeps in main memory besides.
vLLM takes what it is given: the plan says how much of the GPU has to be left to others (`leave_bytes`), and counts for
vLLM what it needs at least.  Bytes of DeepSpeed are those of its ZeRO stages (Rajbhandari et al., arXiv 1910.02054).
"""

from typing import NamedTuple

import torch

from conf.run import RunConfig
from conf.update import DeepSpeedBackend
from tlt_core.drafter.eagle3.model import Eagle3Config, Eagle3Model
from tlt_core.grpo.optimizer import ZERO_BUCKET, ZERO_LIVE
from tlt_core.grpo.pass_memory import pass_bytes, trained_parameters
from tlt_core.machine.memory import COMPILED_PRODUCTS, USABLE
from tlt_core.machine.precision import as_torch
from tlt_core.model.config import DecoderConfig
from tlt_core.rollout.engines import ENGINES
from tlt_core.rollout.kv_memory import slot_bytes

_GB = 1e9
_CPU_PROCESS = 0.55e9  # Python, torch and Ray
# Passes of ever new lengths fill what oneDNN keeps of compiled products, 1.1 MB each, measured on AMX.  With 256 of
# them passes like the demo's take as long as with 1,024, with 64 they take 1.4 times as long.
_PRODUCTS = COMPILED_PRODUCTS * 1.1e6
# They come between blocks of passes of ever new lengths, and malloc fits no later block into what is left beside them.
# Measured in the demo: 0.5 GB more than is in use, besides 0.74 GB of a pass; with half a pass the plan is 7 % short.
_HOLES = 0.5  # of a pass
# Assumed, not measured: figures of GPUs and of the drafter's passes.
_CONTEXT = 0.6e9  # CUDA's, cuBLAS's work space and kernels, for each process on a GPU
_NCCL = 0.5e9  # its buffers, with more than one worker
_GRAPHS = 1.0e9  # CUDA graphs of a rollout engine
_VLLM_TOKENS = 8192  # that vLLM measures its working memory with
_DRAFT_TOKENS = 8  # of one request, behind a full slot
_DRAFTER_COPIES = 32  # bytes a parameter: weights, average, gradient, two moments; in use, tried, sent
_DRAFTER_ROWS = 32  # float32 vectors a token of context that a pass of the drafter's training keeps
_TAPS = 3  # of an EAGLE-3 drafter

_OF_VLLM = ("vLLM at least", "drafter")

Owners = dict[str, int]
"""Bytes by owner."""


class MemoryPlanError(ValueError):
    """The run does not fit.  The text says what takes the memory and what to change."""


class MemoryPlan(NamedTuple):
    phases: dict[str, Owners]  # on a worker's device; load, rollout, update, save
    host: Owners  # in main memory, where the device is a GPU
    leave_bytes: int  # of a GPU that vLLM has to leave to others

    def total(self, phase: str) -> int:
        return sum(self.phases[phase].values())

    @property
    def peak(self) -> tuple[str, int]:
        return max(((phase, self.total(phase)) for phase in self.phases), key=lambda found: found[1])


class _Sizes(NamedTuple):
    model: int  # parameters
    trained: int  # parameters
    item: int  # bytes, of training
    rollout_item: int
    workers: int
    positions: int  # of the longest prompt with the longest response


def memory_plan(cfg: RunConfig, model: DecoderConfig, *, longest_prompt: int | None = None) -> MemoryPlan:
    """cfg: with engine and data types settled.  longest_prompt: in tokens; None: as long as allowed."""
    prompt = cfg.rollout.max_prompt_tokens if longest_prompt is None else longest_prompt
    parameters, trained = trained_parameters(model, cfg.update)
    sizes = _Sizes(
        parameters,
        trained,
        as_torch(cfg.update.dtype).itemsize,
        as_torch(cfg.rollout.dtype).itemsize,
        cfg.cluster.num_workers,
        prompt + cfg.longest_response,
    )
    assert cfg.rollout.engine != "auto", "settle() comes first"
    on_gpu, largest = cfg.cluster.device == "cuda", model.vocab_size * model.hidden_size
    apart = ENGINES[cfg.rollout.engine].own_process
    process = {"processes": _processes(cfg)}
    loading = {"a weight before it is divided": sizes.item * largest} if cfg.update.shards_weights else {}
    trainer = _torch(sizes) if cfg.update.backend.kind == "torch" else _deepspeed(cfg.update.backend, sizes)
    if cfg.algorithm.kl.coef > 0:
        trainer["reference model"] = sizes.item * sizes.model
    drafter = _drafter_training(cfg, model, sizes)
    awake = _vllm(cfg, model, sizes) if apart else _own_engine(cfg, model, sizes)
    asleep = _asleep(cfg, awake)
    # The torch back end rounds its sums to float32 gradients after the last pass.
    a_step = 4 * trained if cfg.update.backend.kind == "torch" else 0
    work = {"passes of the update": max(a_step, pass_bytes(model, cfg.update, sequence=sizes.positions))}
    if not on_gpu and sizes.item == 2:
        process["compiled products"] = int(_PRODUCTS)
        process["holes in the heap"] = int(_HOLES * work["passes of the update"])
    streams = cfg.update.streamed != "off" and cfg.update.backend.kind == "torch"
    held = {"gradients of a streamed pass": sizes.item * trained}  # kept apart until the pass has ended
    beside_rollout = trainer | drafter | (work | held if streams else {})
    phases = {
        "load": process | asleep | loading | trainer,
        "rollout": process | awake | beside_rollout,
        "update": process | asleep | drafter | trainer | work,
        "save": process | asleep | drafter | trainer | {"a gathered tensor": 8 * largest},
    }
    others = process | beside_rollout
    if not cfg.cluster.release_rollout_memory:
        others |= work
    host = _host(cfg, model, sizes) if on_gpu else {}
    return MemoryPlan(phases, host, sum(others.values()) if apart else 0)


def check(plan: MemoryPlan, cfg: RunConfig, *, device_bytes: int) -> None:
    """Raises MemoryPlanError where a phase does not fit into the GPU."""
    phase, needed = plan.peak
    usable = int(device_bytes * USABLE / cfg.cluster.workers_per_gpu)
    if needed <= usable:
        return
    owners = sorted(plan.phases[phase].items(), key=lambda item: -item[1])
    taken = ", ".join(f"{name} {size / _GB:.1f}" for name, size in owners if size >= 0.05 * _GB)
    raise MemoryPlanError(
        f"the run does not fit into {place(cfg, device_bytes)}: {phase} needs {needed / _GB:.1f} GB of "
        f"{usable / _GB:.1f} usable ({taken}).  {remedies(cfg, plan, phase)}"
    )


def place(cfg: RunConfig, device_bytes: int) -> str:
    sharers = cfg.cluster.workers_per_gpu
    part = f"a worker's part, one of {sharers}, of " if sharers > 1 else ""
    return f"{part}a GPU of {device_bytes / _GB:.0f} GB"


def vllm_room(plan: MemoryPlan, cfg: RunConfig, model: DecoderConfig, *, device_bytes: int) -> tuple[int, int]:
    """What vLLM gets of a GPU, and how many responses of full length an engine has room for at once."""
    share = int(min(cfg.rollout.kv_memory_fraction * device_bytes, device_bytes - plan.leave_bytes))
    positions = cfg.rollout.max_prompt_tokens + cfg.longest_response
    slot = _vllm_slot(cfg, model, positions=positions)
    rest = share - sum(size for name, size in plan.phases["rollout"].items() if name in _OF_VLLM)
    return share, max(0, 1 + rest // slot)


def remedies(cfg: RunConfig, plan: MemoryPlan, phase: str) -> str:
    """What would make a phase smaller, largest owner first."""
    found = []
    for name, _ in sorted(plan.phases[phase].items(), key=lambda item: -item[1]):
        found += [setting for setting in _remedies_of(name, cfg) if setting not in found]
    if cfg.cluster.workers_per_gpu > 1:
        found.append("cluster.gpus_per_worker=1, with as many workers as there are GPUs")
    return f"Set {'; or '.join(found)}" if found else "Take a larger GPU or a smaller model"


def _remedies_of(owner: str, cfg: RunConfig) -> list[str]:
    update, found = cfg.update, []
    zero = update.backend if isinstance(update.backend, DeepSpeedBackend) else None
    if owner in ("optimizer", "gradients", "policy in training"):
        if zero is None:
            found += [] if cfg.cluster.shares_gpus else ["update.backend.kind=deepspeed"]
        elif not zero.offload_optimizer and owner == "optimizer":
            found.append("update.backend.offload_optimizer=true")
        if zero is not None and zero.zero_stage < 3 and cfg.cluster.num_workers > 1:
            found.append("update.backend.zero_stage=3")
        if not update.lora.enabled:
            found.append("update.lora.enabled=true")
        if zero is not None and not update.lora.enabled:
            found.append(f"cluster.num_workers above {cfg.cluster.num_workers}")
    if owner == "passes of the update":
        if not update.activation_checkpointing:
            found.append("update.activation_checkpointing=true")
        if update.tokens_per_micro_batch > cfg.rollout.max_prompt_tokens + cfg.rollout.max_new_tokens:
            found.append(f"update.tokens_per_micro_batch below {update.tokens_per_micro_batch}")
    if owner in ("keys and values", "hidden states"):
        found.append(f"rollout.max_live_requests below {cfg.rollout.max_live_requests}")
        if cfg.rollout.engine == "builtin" and cfg.cluster.device == "cuda" and not cfg.why_not_vllm:
            found.append("rollout.engine=vllm, which takes what is left ('make vllm-env')")
    if owner in ("rollout weights", "vLLM at least") and not cfg.cluster.release_rollout_memory:
        found.append("cluster.release_rollout_memory=true")
    if owner == "vLLM at least" and cfg.cluster.num_workers % (2 * cfg.rollout.workers_per_engine) == 0:
        found.append(f"rollout.vllm.tensor_parallel={2 * cfg.rollout.workers_per_engine}")
    return found


# ------------------------------------------------------------------------------------------ owners


def _processes(cfg: RunConfig) -> int:
    cluster = cfg.cluster
    if cluster.device == "cpu":
        return int(_CPU_PROCESS)
    uses_nccl = cluster.num_workers > 1 and not cluster.shares_gpus
    return int(_CONTEXT * (1 + ENGINES[cfg.rollout.engine].own_process) + uses_nccl * _NCCL)


def _torch(sizes: _Sizes) -> Owners:
    """Masters are the weights themselves in float32; the sum of gradients is float64."""
    masters = 4 if sizes.item == 2 else 0
    return {
        "policy in training": sizes.item * sizes.model,
        "optimizer": (masters + 8) * sizes.trained,
        "gradients": 8 * sizes.trained,
    }


def _deepspeed(zero: DeepSpeedBackend, sizes: _Sizes) -> Owners:
    stage, half = zero.zero_stage, sizes.item == 2
    share = sizes.workers if stage else 1
    optimizer = (4 if half or stage else 0) + 8
    buffers = 2 * sizes.item * min(ZERO_BUCKET, sizes.trained) if stage else 0  # one is filled, one sent
    if stage == 3:
        buffers += sizes.item * min(ZERO_LIVE, sizes.model)
    return {
        "policy in training": sizes.item * sizes.model // (share if stage == 3 else 1),
        "optimizer": 0 if zero.offload_optimizer else optimizer * sizes.trained // share,
        "gradients": 4 * sizes.trained // (share if stage >= 2 else 1),
        "buffers of DeepSpeed": buffers,
    }


def _own_engine(cfg: RunConfig, model: DecoderConfig, sizes: _Sizes) -> Owners:
    live, item = cfg.rollout.max_live_requests, sizes.rollout_item
    weights = item * sizes.model
    if cfg.cluster.device == "cpu" and item == 2:
        weights += item * model.vocab_size * model.hidden_size  # the packed head stands beside the plain one
    slot = slot_bytes(model, positions=sizes.positions + _DRAFT_TOKENS, dtype=as_torch(cfg.rollout.dtype))
    owners = {"rollout weights": weights, "keys and values": live * slot}
    if cfg.cluster.device == "cuda":
        owners["CUDA graphs"] = int(_GRAPHS)
    if _has_drafter(cfg):
        owners["hidden states"] = live * sizes.positions * (_TAPS + 1) * model.hidden_size * item
        drafter_slot = 2 * sizes.positions * model.num_kv_heads * model.head_dim * item
        owners["drafter"] = item * _drafter_parameters(cfg, model) + live * drafter_slot
    if cfg.rollout.environment is not None and cfg.cluster.device == "cpu":
        owners["turns that go on"] = owners["keys and values"] + owners.get("hidden states", 0)
    return owners


def _vllm(cfg: RunConfig, model: DecoderConfig, sizes: _Sizes) -> Owners:
    """Weights, working memory, and keys and values of one request: with less vLLM does not start.

    Tensor parallelism divides all but hidden states, logits and graphs."""
    live, item, parts = cfg.rollout.max_live_requests, sizes.rollout_item, cfg.rollout.workers_per_engine
    layer = _VLLM_TOKENS * (4 * model.hidden_size + 3 * model.intermediate_size // parts) * item
    least = item * sizes.model // parts + layer + 3 * 4 * live * model.vocab_size + int(_GRAPHS)
    least += _vllm_slot(cfg, model, positions=sizes.positions)
    owners = {"vLLM at least": least}
    if _has_drafter(cfg):
        owners["drafter"] = item * _drafter_parameters(cfg, model) // parts
    return owners


def _vllm_slot(cfg: RunConfig, model: DecoderConfig, *, positions: int) -> int:
    """Keys and values of one request on one GPU.  A head of them is not divided further."""
    parts = min(cfg.rollout.workers_per_engine, model.num_kv_heads)
    return slot_bytes(model, positions=positions, dtype=as_torch(cfg.rollout.dtype)) // parts


def _asleep(cfg: RunConfig, awake: Owners) -> Owners:
    if not cfg.cluster.release_rollout_memory:
        return awake
    stays = () if ENGINES[cfg.rollout.engine].own_process else ("rollout weights", "CUDA graphs", "drafter")
    return {name: size for name, size in awake.items() if name in stays}


def _has_drafter(cfg: RunConfig) -> bool:
    speculation = cfg.rollout.speculation
    return speculation.policy != "off" and (cfg.needs_first_drafter or speculation.drafter_path is not None)


def _trains(cfg: RunConfig) -> bool:
    return cfg.drafter.idle_training.enabled and _has_drafter(cfg)


def _drafter_parameters(cfg: RunConfig, model: DecoderConfig) -> int:
    with torch.device("meta"):
        drafter = Eagle3Model(Eagle3Config.for_target(model, min(cfg.drafter.vocab_size, model.vocab_size)))
    return sum(p.numel() for p in drafter.parameters())


def _drafter_training(cfg: RunConfig, model: DecoderConfig, sizes: _Sizes) -> Owners:
    """In idle time: copies of the drafter, a pass over one response, and what vLLM's worker keeps of the policy."""
    if not _trains(cfg):
        return {}
    context = _DRAFTER_ROWS * 4 * sizes.positions * model.hidden_size
    logits = 3 * 4 * cfg.drafter.depth * cfg.drafter.idle_training.rows_per_step * cfg.drafter.vocab_size
    size = _DRAFTER_COPIES * _drafter_parameters(cfg, model) + context + logits
    if ENGINES[cfg.rollout.engine].own_process:
        ends = 1 if model.tie_word_embeddings else 2
        size += ends * model.vocab_size * model.hidden_size * sizes.rollout_item
    return {"drafter's training": size}


def _host(cfg: RunConfig, model: DecoderConfig, sizes: _Sizes) -> Owners:
    owners = {"processes": int(_CPU_PROCESS) * 2}
    apart = ENGINES[cfg.rollout.engine].own_process
    if apart and cfg.cluster.release_rollout_memory:
        owners["vLLM's weights while it sleeps"] = sizes.rollout_item * sizes.model // cfg.rollout.workers_per_engine
    if apart and _trains(cfg):  # of live responses, and of as many that have ended
        a_response = sizes.positions * ((_TAPS + 1) * model.hidden_size * sizes.rollout_item + 4)
        owners["hidden states"] = 2 * cfg.rollout.max_live_requests * a_response
    zero = cfg.update.backend
    if cfg.cluster.shares_gpus:
        owners["gradients that gloo sums"] = 8 * sizes.trained  # all buckets are under way at once
    if cfg.update.shards_weights:
        owners["model while it is loaded"] = sizes.item * sizes.model
    if isinstance(zero, DeepSpeedBackend) and zero.offload_optimizer:
        owners["optimizer"] = 16 * sizes.trained // (sizes.workers if zero.zero_stage else 1)
    return owners
