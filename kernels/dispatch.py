"""Choice of the implementation of an op, and Triton where it is installed.

Every op has an argument `impl`:

    torch    the specification
    triton   on a GPU; with TRITON_INTERPRET=1, set before this module is imported, also on CPU tensors
    native   C on a CPU, for the ops of rollout and the losses (`kernels/native`)
    auto     Triton on a GPU, C on a CPU where the op has it and it compiles, torch elsewhere; logged once
"""

import ctypes
import functools
import importlib
import logging
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from kernels import native

Impl = Literal["auto", "torch", "triton", "native"]


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return None


triton, tl = _module("triton"), _module("triton.language")
_INTERPRETED = triton is not None and bool(triton.knobs.runtime.interpret)

_log = logging.getLogger(__name__)


def jit(*varying: str) -> Callable[[Any], Any]:
    """`triton.jit`; without Triton the function itself, which is then never launched.

    varying: integer arguments that differ from round to round.  Triton compiles a kernel anew, about a second, for an
    integer that is 1 and for one that 16 divides; for these it does not.
    """
    return lambda kernel: kernel if triton is None else triton.jit(kernel, do_not_specialize=varying)


def uses_triton(impl: Impl, tensor: Tensor, *, op: str) -> bool:
    """Whether Triton runs an op on this input.  Raises ValueError when impl is "triton" and cannot run."""
    if impl in ("torch", "native"):
        return False
    if impl == "auto":
        return _auto(op, tensor.device.type)
    if triton is None:
        raise ValueError(
            f"{op}: impl='triton', but Triton is not installed: pip install triton (Linux), or impl='auto'"
        )
    if tensor.device.type != "cuda" and not _INTERPRETED:
        raise ValueError(
            f"{op}: impl='triton' on a {tensor.device.type} tensor: move it to a GPU, take impl='auto', or set "
            "TRITON_INTERPRET=1 before Python starts (Triton's interpreter is slow: for tests)"
        )
    return True


def native_library(impl: Impl, tensor: Tensor, *, op: str) -> ctypes.CDLL | None:
    """The C kernels if they run this op, else None.  Raises ValueError when impl is "native" and cannot run."""
    if impl not in ("auto", "native") or (impl == "auto" and tensor.device.type != "cpu"):
        return None
    library = native.library()
    if impl == "native" and (library is None or tensor.device.type != "cpu"):
        raise ValueError(
            f"{op}: impl='native' on a {tensor.device.type} tensor cannot run: it needs CPU tensors and a C compiler; "
            "take impl='auto'"
        )
    return library


def training_library(tensor: Tensor, *, op: str) -> ctypes.CDLL | None:
    """The C kernels if they run the layers of training for such tensors: bfloat16 on a CPU.  Their float32 versions
    would not be faster than torch's by what they cost in code."""
    return native_library("auto", tensor, op=op) if tensor.dtype == torch.bfloat16 else None


@functools.cache
def _auto(op: str, device_type: str) -> bool:
    chosen = device_type == "cuda" and triton is not None
    if device_type == "cuda" and triton is None:
        _log.warning("%s: torch on cuda, which is slower: Triton is not installed", op)
    elif chosen:
        _log.info("%s: triton on %s", op, device_type)
    return chosen


def power_of_two(size: int) -> int:
    """The smallest power of two that is at least `size`, as Triton's block shapes require."""
    return 1 << max(0, size - 1).bit_length()
