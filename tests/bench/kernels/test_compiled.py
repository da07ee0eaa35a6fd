"""Every Triton kernel, as it is launched, is accepted by Triton's compiler and NVIDIA's assembler, and spills nothing:
what the interpreter does not check."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
KERNELS = {
    "_attend_tree",
    "_choose_among_splits",
    "_choose_in_split",
    "_gradient_kernel",
    "_join_splits",
    "_loss_and_gradient",
    "_move_path",
    "_statistics_kernel",
    "_walk",
}


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize(("capability", "vocabulary"), [(80, "152,064"), (90, "128,256"), (100, "49,152")])
def test_kernels_compile_for_a_gpu(tmp_path: Path, capability: int, vocabulary: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "bench.kernels.compiled", str(capability), vocabulary]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    assert {name for name, *_ in lines} == KERNELS
    assert all(int(spilled) == 0 and int(blocks) >= 1 for _, spilled, blocks in lines), done.stdout
