"""Huge pages hold what was there before, and only whole pages of private anonymous memory are asked for."""

import platform
import re
from pathlib import Path

import psutil
import pytest
import torch

from tlt_core.machine import huge_pages
from tlt_core.machine.huge_pages import _HUGE, _regions, use_huge_pages

MAPS = """\
00400000-10400000 r-xp 00000000 fe:00 12 /usr/bin/python3
10400000-20400000 rw-p 00000000 fe:00 12 /usr/bin/python3
20300000-20c00000 rw-p 00000000 00:00 0 [heap]
30000000-30200000 rw-p 00000000 00:00 0
40100000-40280000 rw-p 00000000 00:00 0
50000000-50400000 rw-s 00000000 00:00 0
60000000-60400000 r--p 00000000 00:00 0
7f0000000000-7f0000400000 rw-p 00000000 00:00 0 [stack]
"""


def test_only_whole_pages_of_private_memory_are_asked_for():
    """The binary, shared and read-only memory and the stack are not; the fifth line holds no whole huge page."""
    assert list(_regions(MAPS)) == [(0x20400000, 0x20C00000), (0x30000000, 0x30200000)]


def _resident_huge_kb() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages"))


@pytest.fixture
def huge_pages_to_spare() -> None:
    if not huge_pages.are_available():
        pytest.skip("this system has no transparent huge pages")
    if psutil.virtual_memory().free < 2 << 30:
        pytest.skip("less than 2 GB are free: there may be nothing left to make huge pages of")


@pytest.mark.usefixtures("huge_pages_to_spare")
def test_memory_moves_and_keeps_its_contents():
    if tuple(map(int, re.findall(r"\d+", platform.release())[:2])) < (6, 1):
        pytest.skip("a kernel before 6.1 cannot collapse memory that is in use")
    values = torch.arange(8 * _HUGE // 4, dtype=torch.int32)
    before_kb, total = _resident_huge_kb(), int(values.sum(dtype=torch.int64))
    assert use_huge_pages() > 0
    assert _resident_huge_kb() >= before_kb + 6 * _HUGE // 1024
    assert int(values.sum(dtype=torch.int64)) == total
