"""Keep freed memory in the process, so that the next step does not fetch it from the kernel again.

glibc returns every large block to the kernel when it is freed and takes a new one, page by page, when torch allocates
the next activation of the same size.  In training on CPUs those page faults cost more than all small operations
together (a third to a half of a forward pass on SmolLM2-135M, most of it system time).
"""

import ctypes
import logging

log = logging.getLogger(__name__)

# malloc.h
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_LARGEST_INT = 2**31 - 1


def keep_freed_memory() -> bool:
    """Make this process's malloc keep what is freed: call it once, early, in a process that trains on the CPU.

    The process then stays at its peak size.  Returns False, and changes nothing, where the C library is not glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        log.info("malloc cannot be told to keep freed memory here: training on the CPU will be slower")
        return False
    # no block is mapped on its own (it would be unmapped when freed), and the heap's end is not given back
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, _LARGEST_INT))
