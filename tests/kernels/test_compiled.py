"""Every Triton kernel, as it is launched, is accepted by Triton's compiler and NVIDIA's assembler, and spills nothing:
what the interpreter does not check."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
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


ROUNDS = """
import collections
import torch
from tests.kernels.compiled import compiling
from kernels.tree.tree_attention import tree_attention
with compiling(90) as found:
    cache = torch.zeros(32, 3, 96, 64, dtype=torch.bfloat16)
    for live in (1, 2, 5, 16, 32):
        for width in (1, 3, 5):
            known, own = torch.zeros(live).long(), torch.ones(live, width, width).bool()
            tree_attention(cache[:live, :, : 3 * width], cache[:live], cache[:live], known, own, impl="triton")
print(collections.Counter(name for name, _ in found)["_attend_tree"])
"""
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def _python(arguments: list[str], cache: Path) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_rounds_of_all_sizes_share_two_kernels(tmp_path: Path) -> None:
    """Each further one costs every worker a second at its start."""
    assert int(_python(["-c", ROUNDS], tmp_path)) == 2  # plain rounds, and those with drafts


@pytest.mark.parametrize(("capability", "vocabulary"), [(80, "152,064"), (90, "128,256"), (100, "49,152")])
def test_kernels_compile_for_a_gpu(tmp_path: Path, capability: int, vocabulary: str) -> None:
    printed = _python(["-m", "tests.kernels.compiled", str(capability), vocabulary], tmp_path)
    lines = [line.split() for line in printed.splitlines()]
    assert {name for name, *_ in lines} == KERNELS
    assert all(int(spilled) == 0 and int(blocks) >= 1 for _, spilled, blocks in lines), printed
