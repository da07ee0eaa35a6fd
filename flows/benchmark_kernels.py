"""`tlt bench kernels --device cpu|cuda`: every op's bytes and operations a second, beside the device's own ceilings.

The ceilings are measured in the same run: a large copy and a large bf16 product.  On a CPU the torch implementations
run at small shapes; on a GPU the Triton kernels beside torch, at the shapes of Qwen2.5-7B.
"""

from pathlib import Path
from typing import Any

from prefect import flow

from conf.schema import RunConfig
from flows.benchmark import write_report
from tlt_core import bench_kernels
from tlt_core.bench_kernels import QWEN_7B, SMALL


@flow(name="bench-kernels")
def bench_kernels_flow(cfg: RunConfig, *, repeats: int, out: Path, command: str, device: str = "cpu") -> dict[str, Any]:
    """Measure, write the report; returns it.  Of the configuration nothing is used: shapes belong to the device."""
    place = bench_kernels.device_named(device)
    shapes = QWEN_7B if place.type == "cuda" else SMALL
    rows = bench_kernels.run(place, shapes, repeats=repeats)
    return write_report(out, command=command, repeats=repeats, rows=rows, verdicts=[])
