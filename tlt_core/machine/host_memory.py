"""Keep freed memory: glibc returns large blocks to the kernel, and page faults take a large part of a training pass."""

import ctypes
import logging

log = logging.getLogger(__name__)

# From malloc.h
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_LARGEST_INT = 2**31 - 1


def keep_freed_memory() -> bool:
    """Make malloc keep freed memory.  Call it once, early, in a process that trains on the CPU.

    The process then stays at its peak size.  Returns False, and changes nothing, where the C library is not glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        log.info("malloc cannot keep freed memory here: training on the CPU will be slower")
        return False
    # No block gets a mapping of its own, which would be unmapped when it is freed, and the heap never shrinks.
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, _LARGEST_INT))
