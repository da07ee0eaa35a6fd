"""DeepSpeed ZeRO over the worker group, behind the same interface as `torch_backend`.  Only this file imports it.

DeepSpeed averages gradients over workers while our losses are shares of a sum, so losses are multiplied by the number
of workers.  Gradients add up over any number of backward passes until `step` (DeepSpeed's unmanaged accumulation).
"""

import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

import deepspeed
import deepspeed.ops
import torch
import torch.distributed as dist
from deepspeed.runtime.zero import GatheredParameters, register_external_parameter
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from torch import Tensor, nn

from conf.optimizer import AdamWConfig
from conf.update import DeepSpeedBackend as DeepSpeedConfig
from tlt_core.grpo.micro_batch import idle_micro_batch
from tlt_core.grpo.optimizer import ZERO_BUCKET, ZERO_LIVE, decay_groups
from tlt_core.grpo.policy import PolicyModel, inputs_of

_MOMENTS = ("exp_avg", "exp_avg_sq")


class DeepSpeedBackend:
    """See the module docstring.  torch.distributed must be initialised, even for one worker."""

    needs_equal_passes = True
    sums_exactly = False

    def __init__(
        self, model: PolicyModel, cfg: AdamWConfig, backend: DeepSpeedConfig, *, world_size: int, device: torch.device
    ) -> None:
        """model: on `device`; under ZeRO-3 it may be on the CPU, from where each weight goes to `device` and is divided
        before the next one comes, so no device holds all of it."""
        if not dist.is_initialized():
            raise RuntimeError("DeepSpeed needs a torch.distributed group: call init_process_group first")
        self._stage, self._world_size, self._max_norm = backend.zero_stage, world_size, cfg.max_grad_norm
        self._bucket_bytes = backend.gather_bucket_mb << 20
        matrices, vectors = decay_groups(model.named_parameters())
        self._trainable = matrices | vectors
        first = next(iter(self._trainable.values()))
        self._bf16, self._norm = first.dtype == torch.bfloat16, 0.0
        decays = ((matrices, cfg.weight_decay), (vectors, 0.0))
        groups = [{"params": list(own.values()), "weight_decay": decay} for own, decay in decays if own]
        # lr 0: DeepSpeed may step once to make the optimizer's state
        optimizer = torch.optim.AdamW(groups, lr=0.0, betas=cfg.betas, eps=cfg.eps)
        if self._plain:
            optimizer.register_step_pre_hook(self._clip)
        os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed asks for it; a worker sees one device only
        # The shared-memory all-reduce takes over a minute to compile on first use and serves CPU hosts only.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        config = _engine_config(cfg, backend, bf16=self._bf16)
        if self._stage == 3:
            deepspeed.zero.Init(module=model, config_dict_or_path=config)
            _move_buffers(model, device)
        self._engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=config, dist_init_required=False
        )
        if self._stage == 3:
            register_external_parameter(model, model.decoder.head_weight)  # used outside its own module
        self._make_optimizer_state(device)

    @property
    def _plain(self) -> bool:
        """DeepSpeed leaves parameters and torch optimizer as they are."""
        return self._stage == 0 and not self._bf16

    def forward(self, *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        logprob_C, entropy_C = self._engine(*inputs)
        return logprob_C, entropy_C

    def backward(self, loss: Tensor) -> None:
        self._engine.backward(loss * self._world_size)

    def step(self, lr: float, scale: float = 1.0) -> float:
        assert scale == 1.0, "DeepSpeed gets losses with their final weights"
        for settings in self._engine.optimizer.param_groups:
            settings["lr"] = lr
        self._engine.step()
        return self._norm if self._plain else float(self._engine.get_global_grad_norm())

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter by its name in the model, compute dtype, full; gathered a bucket at a time under ZeRO-3."""
        named = list(self._engine.module.named_parameters())
        if self._stage < 3:
            yield from ((name, parameter.detach()) for name, parameter in named)
            return
        for bucket in _buckets(named, self._bucket_bytes):
            with GatheredParameters([parameter for _, parameter in bucket]):
                yield from ((name, parameter.detach().clone()) for name, parameter in bucket)

    def named_state(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._trainable.items():
            yield f"master/{name}", self._master(parameter).detach().float().contiguous()
            for moment in _MOMENTS:
                yield f"{moment}/{name}", self._moment(parameter, moment).detach().float().contiguous()

    def state_shapes(self) -> dict[str, torch.Size]:
        return {
            f"{kind}/{name}": torch.Size(getattr(parameter, "ds_shape", parameter.shape))
            for name, parameter in self._trainable.items()
            for kind in ("master", *_MOMENTS)
        }

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor], *, step: int) -> None:
        for name, parameter in self._trainable.items():
            values = {kind: state[f"{kind}/{name}"].to(parameter.device) for kind in ("master", *_MOMENTS)}
            if self._stage == 3:
                self._load_sharded(parameter, values)
                continue
            parameter.data.copy_(values["master"])
            if self._stage == 0:
                self._master(parameter).data.copy_(values["master"])
                for moment in _MOMENTS:
                    self._moment(parameter, moment).copy_(values[moment])
            else:
                safe_set_full_fp32_param(parameter, values["master"])
                for moment in _MOMENTS:
                    safe_set_full_optimizer_state(parameter, values[moment], moment)
        self._set_step_count(step)

    def close(self) -> None:
        """Release DeepSpeed's hooks and buffers, before the process group goes."""
        self._engine.destroy()

    def _clip(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Clip here, after the all-reduce and before the step: in float32 without ZeRO, DeepSpeed does not report the
        norm.  There it does not skip a step whose gradient is not finite either; AdamW skips parameters without one."""
        self._norm = float(nn.utils.clip_grad_norm_(self._trainable.values(), self._max_norm))
        if not math.isfinite(self._norm):
            for parameter in self._trainable.values():
                parameter.grad = None

    def _make_optimizer_state(self, device: torch.device) -> None:
        """Make a step with gradient 0 and learning rate 0, after which moments exist and can be read and set.

        Stages 1 and 2 link weights to their moments in the step of the first parameter group and would miss those of
        the second group, so both are made before."""
        if self._stage in (1, 2):
            optimizer = self._engine.basic_optimizer
            for shard in (shard for group in optimizer.param_groups for shard in group["params"]):
                moments = {moment: torch.zeros_like(shard) for moment in _MOMENTS}
                optimizer.state[shard] = {"step": torch.zeros(()), **moments}
        logprobs_C, _ = self.forward(*inputs_of(idle_micro_batch(), device))
        self.backward(logprobs_C.sum())
        self.step(0.0)
        self._set_step_count(0)

    def _set_step_count(self, step: int) -> None:
        for moments in self._engine.basic_optimizer.state.values():
            moments["step"].fill_(step)

    def _master(self, parameter: nn.Parameter) -> Any:
        if self._stage > 0:
            return safe_get_full_fp32_param(parameter)
        if self._plain:
            return parameter
        wrapped = self._engine.optimizer  # bf16 without ZeRO: groups of weights beside groups of float32 masters
        groups = zip(wrapped.fp16_groups, wrapped.fp32_groups, strict=True)
        pairs = (pair for group in groups for pair in zip(*group, strict=True))
        return next(master for weight, master in pairs if weight is parameter)

    def _moment(self, parameter: nn.Parameter, moment: str) -> Any:
        if self._stage > 0:
            return safe_get_full_optimizer_state(parameter, moment)
        return self._engine.basic_optimizer.state[self._master(parameter)][moment]

    def _load_sharded(self, parameter: Any, values: dict[str, Tensor]) -> None:
        """ZeRO-3: each worker keeps its slice, of equal length on all workers, the last one padded."""
        length = parameter.ds_tensor.numel()
        start = dist.get_rank() * length
        with GatheredParameters([parameter], modifier_rank=0):
            parameter.data.copy_(values["master"])
        for kind, value in values.items():
            part = value.flatten()[start : start + length]
            part = torch.cat([part, part.new_zeros(length - len(part))])
            if kind == "master":
                safe_set_local_fp32_param(parameter, part)
            else:
                safe_set_local_optimizer_state(parameter, part, kind)


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    """DeepSpeed moves weights alone."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def _engine_config(cfg: AdamWConfig, backend: DeepSpeedConfig, *, bf16: bool) -> dict[str, Any]:
    zero: dict[str, Any] = {
        "stage": backend.zero_stage,
        "reduce_bucket_size": ZERO_BUCKET,
        "allgather_bucket_size": ZERO_BUCKET,
        "stage3_max_live_parameters": ZERO_LIVE,
    }
    if backend.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    plain = backend.zero_stage == 0 and not bf16
    return {
        "train_micro_batch_size_per_gpu": 1,  # not used: batches are packed
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": 0.0 if plain else cfg.max_grad_norm,
        "zero_optimization": zero,
        "bf16": {"enabled": bf16},
        "data_types": {"grad_accum_dtype": "fp32"} if backend.zero_stage > 0 else {},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }


def _buckets(named: list[tuple[str, Any]], most_bytes: int) -> Iterator[list[tuple[str, Any]]]:
    """Runs of parameters of limited full size (numel() is 0 while a parameter is sharded; ds_numel is not)."""
    bucket: list[tuple[str, Any]] = []
    size = 0
    for name, parameter in named:
        own = parameter.ds_numel * parameter.element_size()
        if bucket and size + own > most_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, parameter))
        size += own
    if bucket:
        yield bucket
