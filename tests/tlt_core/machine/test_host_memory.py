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
