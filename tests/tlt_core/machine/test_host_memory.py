"""Freed memory is used again without page faults."""

import ctypes
import subprocess
import sys

import pytest

_SCRIPT = """
import resource
import torch
from tlt_core.machine.memory import keep_freed_memory

assert keep_freed_memory()

def faults_of_one_gigabyte():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(16):
        torch.ones(16 << 20)  # 64 MiB, freed at once
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults_of_one_gigabyte()
print(faults_of_one_gigabyte())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc")
def test_second_use_of_memory_is_free() -> None:
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, check=True)
    assert int(done.stdout) < 1000, "a page fault for every 4 KiB would be 262,144"


_GIVEN_BACK = """
import psutil
import torch
from tlt_core.machine.memory import give_freed_memory_back, keep_freed_memory

assert keep_freed_memory()
taken, before = [torch.ones(1 << 18) for _ in range(256)], psutil.Process().memory_info().rss  # 256 MiB
last = torch.ones(1 << 18)  # behind them
del taken
give_freed_memory_back()
print(before - psutil.Process().memory_info().rss >> 20)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library is not glibc")
def test_freed_memory_goes_back_when_asked() -> None:
    done = subprocess.run([sys.executable, "-c", _GIVEN_BACK], capture_output=True, check=True)
    assert int(done.stdout) > 200, "of 256 MiB"
