"""Which implementation of an op runs, and Triton where it is installed.

`impl` of every op: "torch" is the specification; "triton" needs a GPU, or Triton's interpreter, which runs the same
kernels on CPU tensors when TRITON_INTERPRET=1 is set before this module is imported; "native" is C on a CPU, for the
ops of rollout and the drafter's loss (`kernels/native`); "auto" takes Triton on a GPU, C on a CPU where both op and
machine have it, torch elsewhere, and says so once.  Importing the ops needs no Triton: it is packaged for Linux alone.
"""

import ctypes
import functools
import importlib
import logging
from typing import Any, Literal

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


def jit(kernel: Any) -> Any:
    """`triton.jit`, or the function as it is where there is no Triton and `uses_triton` lets nobody launch it."""
    return kernel if triton is None else triton.jit(kernel)


def uses_triton(impl: Impl, tensor: Tensor, *, op: str) -> bool:
    """Decide by the device of an op's input.  Raises ValueError when "triton" is asked for and cannot run."""
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
            "TRITON_INTERPRET=1 before Python starts (Triton's interpreter, for tests: slow)"
        )
    return True


def native_library(impl: Impl, tensor: Tensor, *, op: str) -> ctypes.CDLL | None:
    """The C kernels, where they are to run.  Raises ValueError when "native" is asked for and cannot."""
    if impl not in ("auto", "native") or (impl == "auto" and tensor.device.type != "cpu"):
        return None
    library = native.library()
    if impl == "native" and (library is None or tensor.device.type != "cpu"):
        raise ValueError(
            f"{op}: impl='native' on a {tensor.device.type} tensor cannot run: it needs CPU tensors and a C compiler; "
            "take impl='auto'"
        )
    return library


@functools.cache
def _auto(op: str, device_type: str) -> bool:
    chosen = device_type == "cuda" and triton is not None
    if device_type == "cuda" and triton is None:
        _log.warning("%s: torch on cuda, since Triton is not installed: slower", op)
    elif chosen:
        _log.info("%s: triton on %s", op, device_type)
    return chosen


def power_of_two(size: int) -> int:
    """The smallest one that holds `size`; what Triton's block shapes must be."""
    return 1 << max(0, size - 1).bit_length()
