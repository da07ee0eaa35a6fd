"""Weights in huge pages: a decode pass reads all of them, and with pages of 4 KiB address look-ups cost a fifth of it.

Linux gives anonymous memory huge pages where a process asks for them (`transparent_hugepage/enabled` is `madvise` on
most machines).  Measured on one core (SmolLM2-135M, bf16): all projections of a token 12.3 -> 9.5 ms, of 16 tokens
20 -> 17.4 ms, for a second's work.

Asked for is whatever the process has mapped at that moment, as oneDNN does not say where its packed weights lie: a
second or more for each gigabyte that is in small pages then, so not a thing to do in every step of a process that also
trains (0.7 to 1.3 s, and 4.7 in the first one, for no gain in the update).  Memory that is reserved at that moment, but
not touched, gets huge pages when it is.
"""

import ctypes
import re
import sys
from collections.abc import Iterator
from pathlib import Path

_HUGE = 2 << 20  # bytes of a huge page on x86-64 and most others; a smaller true size is no harm
_MADV_HUGEPAGE = 14  # from now on
_MADV_COLLAPSE = 25  # what is there already; Linux 6.1 and newer
_MAPS = Path("/proc/self/maps")
_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_ANONYMOUS = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p \S+ \S+ 0 *(\[heap\])?")


def use_huge_pages() -> int:
    """Ask for huge pages for the process's memory; returns the bytes that are in them for certain.

    0 where the system has none to give (not Linux, switched off, a kernel before 6.1 gives them later if at all).
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
    """Whether the system gives them to those who ask."""
    return sys.platform.startswith("linux") and _ENABLED.is_file() and "[never]" not in _ENABLED.read_text()


def _regions(maps: str) -> Iterator[tuple[int, int]]:
    """Whole huge pages of private anonymous memory that may be written; `maps`: as /proc/PID/maps has them."""
    for line in maps.splitlines():
        found = _ANONYMOUS.fullmatch(line.strip())
        if found is None:
            continue
        start = -(-int(found[1], 16) // _HUGE) * _HUGE
        end = int(found[2], 16) // _HUGE * _HUGE
        if start < end:
            yield start, end
