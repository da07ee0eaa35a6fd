"""How much memory there is, and how much this process has taken."""

import ctypes
import logging
import os
import re
import resource
from pathlib import Path

import psutil
import torch

log = logging.getLogger(__name__)

_STATUS = Path("/proc/self/status")
# From malloc.h
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_LARGEST_INT = 2**31 - 1
USABLE = 0.95  # of a GPU: torch's allocator keeps pieces that fit nothing
# Marketed sizes, in GB; `--gpu 80` names one that is not here.
GPUS_GB = {
    "l4": 24,
    "rtx4090": 24,
    "rtx5090": 32,
    "a100-40": 40,
    "l40s": 48,
    "a100": 80,
    "h100": 80,
    "h200": 141,
    "b200": 180,
}


class GpuError(RuntimeError):
    """A process has no GPU, or one that is too small."""


def warn_of_limits() -> None:
    """MKL, which multiplies torch's float32 matrices, silently takes another kernel where it gets no memory."""
    for name, kind, option in (("address space", resource.RLIMIT_AS, "-v"), ("data", resource.RLIMIT_DATA, "-d")):
        limit = resource.getrlimit(kind)[0]
        if limit != resource.RLIM_INFINITY:
            log.warning(
                "the %s of a process is limited to %.1f GB (ulimit %s): where torch gets no memory, results may differ "
                "silently in their last bits; say 'ulimit %s unlimited', and limit memory by a container",
                name,
                limit / 1e9,
                option,
                option,
            )


def keep_freed_memory() -> bool:
    """Make malloc keep freed memory: glibc returns large blocks to the kernel, and page faults take a large part of a
    training pass.  Call it once, early.  Returns False, and changes nothing, where the C library is not glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        log.info("malloc cannot keep freed memory here: training on the CPU will be slower")
        return False
    # No block gets a mapping of its own, which would be unmapped when it is freed, and the heap never shrinks.
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, _LARGEST_INT))


def give_freed_memory_back() -> None:
    """To the kernel, all that malloc keeps.  Does nothing where the C library is not glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


COMPILED_PRODUCTS = 256  # that oneDNN keeps; by default 1,024, which passes of ever new lengths fill


def keep_few_products() -> None:
    """Before oneDNN's first product in this process: bound what it keeps.  A user's own bound stays."""
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(COMPILED_PRODUCTS))


def peak_bytes(device: torch.device) -> int:
    """Most that this process has held so far: reserved by torch on a GPU; resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    found = re.search(r"VmHWM:\s+(\d+) kB", _STATUS.read_text()) if _STATUS.is_file() else None
    return int(found.group(1)) * 1024 if found else int(psutil.Process().memory_info().rss)


def gpu_bytes() -> int | None:
    """Of the smallest GPU that this process sees; None: there is none."""
    sizes = [torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())]
    return min(sizes, default=None)


def require_gpu(needed: int, *, workers: int) -> None:
    """Take this process's share of its GPU, which `workers` processes have: beyond it torch first gives back what it
    keeps, and then fails here rather than in a neighbour.  Raises GpuError where the share is smaller than `needed`
    bytes."""
    found = gpu_bytes()
    if found is None:
        raise GpuError(
            "cluster.device=cuda, and a worker sees no GPU: set cluster.gpus_per_worker=1, and check that its torch is "
            "built for CUDA (tlt doctor).  cluster.device=cpu runs without"
        )
    if needed > found * USABLE / workers:
        raise GpuError(
            f"a worker takes {needed / 1e9:.1f} GB, and its GPU has {found * USABLE / 1e9:.1f} GB that can be used"
            f"{f' by {workers} workers' if workers > 1 else ''}: 'tlt doctor CONFIG --gpu {found / 1e9:.0f}' says what "
            "takes them and what to change"
        )
    if workers > 1:
        torch.cuda.set_per_process_memory_fraction(USABLE / workers)


def named_gpu_bytes(name: str) -> int:
    """ "h100" or "80" -> bytes.  Raises ValueError."""
    size = GPUS_GB.get(name.lower()) or (float(name) if re.fullmatch(r"\d+(\.\d+)?", name) else 0)
    if not 1 <= size <= 1000:
        raise ValueError(f"--gpu {name}: give a GPU's memory in GB, e.g. 80, or one of {', '.join(GPUS_GB)}")
    return int(size * 1e9)
