"""Weights in huge pages: a decode pass reads all weights, and with pages of 4 KiB address look-ups cost a fifth of it.

We ask for everything that the process has mapped, since oneDNN does not say where its packed weights are.  This takes a
second or more for each gigabyte in small pages, so do not ask in every step of a process that also trains.
"""

import ctypes
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

_HUGE = 2 << 20  # bytes of a huge page on x86-64 and most others; where they are smaller, nothing breaks
_MADV_HUGEPAGE = 14  # for memory that is touched from now on
_MADV_COLLAPSE = 25  # for memory that is in use; Linux 6.1 and newer
_MAPS = Path("/proc/self/maps")
_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_ANONYMOUS = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p \S+ \S+ 0 *(\[heap\])?")


def tunables(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variable with which a process that is started gets huge pages for its new memory, which saves page faults,
    and time of address look-ups.  Needs glibc 2.35; older ones ignore it.  What the user has set stays."""
    given = environment.get("GLIBC_TUNABLES")  # the last value of a tunable counts
    return {"GLIBC_TUNABLES": ":".join(filter(None, ("glibc.malloc.hugetlb=1", given)))}


def use_huge_pages() -> int:
    """Ask for huge pages for the memory of this process; returns the bytes that are certainly in them.

    0 where there are none: not Linux, switched off, or a kernel before 6.1, which may give them later.
    """
    if not are_available():
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    got = 0
    for start, end in list(_regions(_MAPS.read_text())):
        if libc.madvise(start, end - start, _MADV_HUGEPAGE) == 0 and (
            libc.madvise(start, end - start, _MADV_COLLAPSE) == 0
        ):
            got += end - start
    return got


def are_available() -> bool:
    """Whether the system gives huge pages to processes that ask."""
    return sys.platform.startswith("linux") and _ENABLED.is_file() and "[never]" not in _ENABLED.read_text()


def _regions(maps: str) -> Iterator[tuple[int, int]]:
    """Start and end of writable private anonymous memory, in whole huge pages.  maps: text of /proc/PID/maps."""
    for line in maps.splitlines():
        found = _ANONYMOUS.fullmatch(line.strip())
        if found is None:
            continue
        start = -(-int(found[1], 16) // _HUGE) * _HUGE
        end = int(found[2], 16) // _HUGE * _HUGE
        if start < end:
            yield start, end
