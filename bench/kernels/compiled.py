"""`tlt bench compiled`: every Triton kernel as it is launched, compiled for NVIDIA GPUs, which needs none.

The ops of `bench/kernels/ops.py` are called with vocabularies and head sizes of real models.  Where they would launch
a kernel, it is compiled instead, for the same types, alignment and constants.  NVIDIA's tools tell what it takes:

    registers    of a thread.  65,536 of a multiprocessor are shared by its threads
    local        bytes of a thread that did not fit into registers (spilled), in slow memory
    shared       bytes of a block
    blocks       of it that run at a time on one multiprocessor, by all three limits

A row is the worst of all launches of a kernel.

Nothing is computed by the kernels; their values are tested under Triton's interpreter.
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
from prefect import flow
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from bench.kernels.ops import Shapes, works
from bench.report import write_report
from bench.verdicts import verdict
from conf.run import RunConfig
from kernels import dispatch
from kernels.loss.distill_loss import distill_loss
from kernels.sampling.coupled_sample import coupled_sample
from kernels.tree.tree_attention import tree_attention

_REGISTERS, _THREADS, _MOST_BLOCKS, _WARP = 65_536, 2048, 32, 32  # of a multiprocessor, from sm_80 to sm_100
_SHARED = {80: 164 * 1024, 90: 228 * 1024, 100: 228 * 1024}  # bytes of a multiprocessor
_RESERVED = 1024  # bytes of it that each block takes besides
# Few rows: a kernel does not depend on their number.
_MODELS = {
    "vocabulary 49,152, heads of 64": Shapes(49_152, 256, 3, 3, 64, 2, 16_000, 8, ((2, 4, 256),), 1, 64),
    "vocabulary 128,256, heads of 128": Shapes(128_256, 256, 8, 4, 128, 2, 32_000, 8, ((2, 8, 256),), 1, 64),
    "vocabulary 152,064, heads of 128": Shapes(152_064, 256, 4, 7, 128, 2, 32_000, 8, ((2, 8, 256),), 1, 64),
}


class Compiled(NamedTuple):
    """A kernel on one GPU."""

    name: str
    registers: int
    local: int
    shared: int
    warps: int

    def blocks(self, capability: int) -> int:
        """That run at a time on a multiprocessor."""
        threads = self.warps * _WARP
        by_registers = _REGISTERS // (max(1, self.registers) * threads)
        by_shared = _SHARED[capability] // (self.shared + _RESERVED)
        return min(by_registers, by_shared, _THREADS // threads, _MOST_BLOCKS)


@flow(name="bench-compiled")
def bench_compiled(cfg: RunConfig, *, repeats: int, out: Path, command: str) -> dict[str, Any]:
    """Compile and write the report; returns it.  Neither configuration nor repeats are used."""
    rows: list[dict[str, Any]] = []
    for capability in _SHARED:
        kernels = [kernel for shapes in _MODELS.values() for kernel in compiled(shapes, capability)]
        for name in sorted({kernel.name for kernel in kernels}):
            own = [kernel for kernel in kernels if kernel.name == name]
            rows.append(
                {
                    "configuration": name,
                    "GPU": f"sm_{capability}",
                    "registers": max(kernel.registers for kernel in own),
                    "local": max(kernel.local for kernel in own),
                    "shared": max(kernel.shared for kernel in own),
                    "blocks": min(kernel.blocks(capability) for kernel in own),
                }
            )
    verdicts = [
        verdict("most bytes that a thread spills", [max(row["local"] for row in rows)], 0, at_most=True),
        verdict("fewest blocks on a multiprocessor", [min(row["blocks"] for row in rows)], 1),
    ]
    return write_report(out, command=command, repeats=1, rows=rows, verdicts=verdicts)


def compiled(shapes: Shapes, capability: int) -> list[Compiled]:
    """Every kernel that the ops launch on these shapes.  capability: 80 (A100), 90 (H100, H200), 100 (B200).

    Not where TRITON_INTERPRET is set: the interpreter replaces the compiler.
    """
    with compiling(capability) as found:
        for work in works(torch.device("cpu"), shapes):
            if "triton" in work.impls:
                work.call("triton")
        _other_launches(shapes)
    return sorted(_used(kernel) for kernel in found.values())


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
        mock.patch.object(triton.runtime.driver, "_active", _Driver(capability)),
    ):
        yield found


def _other_launches(shapes: Shapes) -> None:
    """Constants and types that the benchmark does not use."""
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


class _Driver:
    """What Triton asks the driver of a GPU when it compiles."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, _WARP)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0


def _used(kernel: Any) -> Compiled:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        command = [str(tool), "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (registers,), (stack,), (local,) = (re.findall(rf"{word}:(\d+)", said) for word in ("REG", "STACK", "LOCAL"))
    spilled = max(int(stack), int(local))
    return Compiled(kernel.name, int(registers), spilled, kernel.metadata.shared, kernel.metadata.num_warps)


def _main() -> Iterator[str]:
    """For the test, which cannot compile in its own process."""
    (shapes,) = (shapes for model, shapes in _MODELS.items() if sys.argv[2] in model)
    for kernel in compiled(shapes, int(sys.argv[1])):
        yield f"{kernel.name} {kernel.local} {kernel.blocks(int(sys.argv[1]))}"


if __name__ == "__main__":
    print("\n".join(_main()))
