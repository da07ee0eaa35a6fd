"""`tlt bench kernels --device cpu|cuda`: every op's bytes and operations a second, beside the device's own ceilings.

The ceilings are measured in the same run: a large copy and a large bf16 product.  On a CPU the torch implementations
run at small shapes; on a GPU the Triton kernels beside torch, at the shapes of Qwen2.5-7B.
"""

from pathlib import Path
from typing import Any

from prefect import flow

from bench.kernels import ops as bench_kernels
from bench.kernels.ops import QWEN_7B, SMALL
from bench.report import write_report
from conf.run import RunConfig


@flow(name="bench-kernels")
def bench_kernels_flow(cfg: RunConfig, *, repeats: int, out: Path, command: str, device: str = "cpu") -> dict[str, Any]:
    """Measure and write the report; returns it.  The configuration is not used: shapes depend on the device."""
    place = bench_kernels.device_named(device)
    shapes = QWEN_7B if place.type == "cuda" else SMALL
    rows = bench_kernels.run(place, shapes, repeats=repeats)
    return write_report(out, command=command, repeats=repeats, rows=rows, verdicts=[])
