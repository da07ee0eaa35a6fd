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


def test_a_limit_of_the_address_space_is_named() -> None:
    """MKL without memory takes another kernel silently, and sums are rounded otherwise."""
    script = "import logging; logging.basicConfig(); from tlt_core.machine import memory; memory.warn_of_limits()"

    def said(limit: str) -> str:
        command = ["sh", "-c", f'ulimit {limit}; exec "$0" -c "$1"', sys.executable, script]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr

    assert "address space of a process is limited to 51.2 GB (ulimit -v)" in said("-v 50000000")
    assert "data of a process is limited to 51.2 GB (ulimit -d)" in said("-d 50000000")
    assert said("-n 512") == ""
