"""Every Triton kernel is accepted by Triton's compiler and NVIDIA's assembler: what the interpreter does not check."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("compile_for_gpu.py")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    """For the H200.  Shared memory within 227 KiB, what a program may have there."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(SCRIPT.parents[2])}
    done = subprocess.run([sys.executable, SCRIPT, "90"], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len({name for name, *_ in lines}) == 9
    assert all(int(shared) <= 227 * 1024 and int(size) > 0 for _, shared, size in lines), done.stdout
