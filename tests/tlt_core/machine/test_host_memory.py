"""Freed memory is used again without page faults."""

import ctypes
import subprocess
import sys

import pytest

_SCRIPT = """
import resource, sys
import torch
from tlt_core.machine.host_memory import keep_freed_memory

if sys.argv[1] == "keep":
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
    faults = {
        mode: int(subprocess.run([sys.executable, "-c", _SCRIPT, mode], capture_output=True, check=True).stdout)
        for mode in ("keep", "default")
    }
    assert faults["keep"] < 1000
    assert faults["default"] > 10 * max(1, faults["keep"])
