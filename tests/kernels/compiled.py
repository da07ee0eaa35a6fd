"""Every Triton kernel as it is launched, compiled for NVIDIA GPUs, which needs none:

    python -m tests.kernels.compiled 90 128,256      for sm_90 (H100), with a vocabulary of 128,256

The ops of `bench/kernels/ops.py` are called with vocabularies and head sizes of real models.  Where they would launch
a kernel, it is compiled instead, for the same types, alignment and constants.  Printed are, of each: its name; bytes of
a thread that did not fit into registers (spilled); blocks that run at a time on one multiprocessor.
"""

import contextlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from bench.kernels.ops import Shapes, works
from kernels import dispatch
from kernels.loss.distill_loss import distill_loss
from kernels.sampling.coupled_sample import coupled_sample
from kernels.tree.tree_attention import tree_attention

REGISTERS, THREADS, MOST_BLOCKS, WARP = 65_536, 2048, 32, 32  # of a multiprocessor, from sm_80 to sm_100
SHARED = {80: 164 * 1024, 90: 228 * 1024, 100: 228 * 1024}  # bytes of a multiprocessor
RESERVED = 1024  # bytes of it that each block takes besides
MODELS = {  # by vocabulary.  Few rows: a kernel does not depend on their number
    "49,152": Shapes(49_152, 256, 3, 3, 64, 2, 16_000, 8, ((2, 4, 256),), 1, 64),
    "128,256": Shapes(128_256, 256, 8, 4, 128, 2, 32_000, 8, ((2, 8, 256),), 1, 64),
    "152,064": Shapes(152_064, 256, 4, 7, 128, 2, 32_000, 8, ((2, 8, 256),), 1, 64),
}


class Compiled(NamedTuple):
    """A kernel on one GPU."""

    name: str
    spilled: int
    blocks: int


def main(capability: int, vocabulary: str) -> None:
    """Print every kernel that the ops launch."""
    with compiling(capability) as found:
        for work in works(torch.device("cpu"), MODELS[vocabulary]):
            if "triton" in work.impls:
                work.call("triton")
        other_launches(MODELS[vocabulary])
    for kernel in found.values():
        print(*used(kernel, capability))


@contextlib.contextmanager
def compiling(capability: int) -> Iterator[dict[tuple[str, str], Any]]:
    """While this is open, a launch on CPU tensors compiles; yields what was compiled, by name and hash."""
    found: dict[tuple[str, str], Any] = {}
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        found[kernel.name, kernel.hash] = kernel
        return kernel

    with (
        mock.patch.object(JITFunction, "run", compile_only),
        mock.patch.object(dispatch, "_INTERPRETED", True),  # lets CPU tensors through
        mock.patch.object(torch, "_assert_async"),  # results are not computed
        mock.patch.object(triton.runtime.driver, "_active", Driver(capability)),
    ):
        yield found


def other_launches(shapes: Shapes) -> None:
    """Constants and types that the benchmark of the kernels does not use."""
    keys_N2 = torch.zeros(2, 2, dtype=torch.int32)
    for dtype in (torch.bfloat16, torch.float32):
        logits_NV = torch.zeros(2, shapes.vocab, dtype=dtype)
        coupled_sample(logits_NV, keys_N2, temperature=0.0, impl="triton")
        coupled_sample(logits_NV, keys_N2, temperature=0.7, floors_N=torch.zeros(2), impl="triton")
        probs_NV = torch.zeros(2, shapes.vocab)
        distill_loss(logits_NV, probs_NV, kind="soft_ce", impl="triton")
        distill_loss(logits_NV, probs_NV, kind="tv", impl="triton")
        keys = torch.zeros(1, shapes.kv_heads, 512, shapes.head_dim, dtype=dtype)
        one = torch.ones(1, 1, 1, dtype=torch.bool)
        tree_attention(keys[:, :, : shapes.grouped], keys, keys, torch.zeros(1).long(), one, impl="triton")


class Driver:
    """What Triton asks the driver of a GPU when it compiles."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, WARP)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0


def used(kernel: Any, capability: int) -> Compiled:
    """What NVIDIA's tool says of a kernel, and how many blocks registers, shared memory and threads leave room for."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        command = [str(tool), "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (registers,), (stack,), (local,) = (re.findall(rf"{word}:(\d+)", said) for word in ("REG", "STACK", "LOCAL"))
    threads = kernel.metadata.num_warps * WARP
    by_registers = REGISTERS // (max(1, int(registers)) * threads)
    by_shared = SHARED[capability] // (kernel.metadata.shared + RESERVED)
    blocks = min(by_registers, by_shared, THREADS // threads, MOST_BLOCKS)
    return Compiled(kernel.name, max(int(stack), int(local)), blocks)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
