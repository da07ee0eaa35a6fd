"""`tlt bench kernels --device cpu|cuda`: every op's bytes and operations a second, beside the device's own ceilings.

The ceilings are measured in the same run: a large copy and a large bf16 product.  On a CPU the torch implementations
run at small shapes; on a GPU the Triton kernels beside torch, at the shapes of Qwen2.5-7B.
"""

import logging
from pathlib import Path
from typing import Any

from prefect import flow

from conf.schema import RunConfig
from flows.benchmark import summarise, write_report
from tlt_core import bench_kernels
from tlt_core.bench_kernels import QWEN_7B, SMALL, Clock

_log = logging.getLogger(__name__)


@flow(name="bench-kernels")
def bench_kernels_flow(cfg: RunConfig, *, repeats: int, out: Path, command: str, device: str = "cpu") -> dict[str, Any]:
    """Measure, write the report; returns it.  Of the configuration nothing is used: shapes belong to the device."""
    place = bench_kernels.device_named(device)
    shapes = QWEN_7B if place.type == "cuda" else SMALL
    clock = Clock(place)
    top = [bench_kernels.ceilings(clock, place, shapes) for _ in range(repeats)]
    best = bench_kernels.Ceilings(max(c.bytes_per_s for c in top), max(c.flop_per_s for c in top))
    rows: list[dict[str, Any]] = [
        {"configuration": "ceilings", "device": device, **summarise([c._asdict() for c in top], list(best._fields))}
    ]
    _log.info("%s: copy %.1f GB/s, bf16 product %.1f GFLOP/s", device, best.bytes_per_s / 1e9, best.flop_per_s / 1e9)
    for work in bench_kernels.works(place, shapes):
        measured = [bench_kernels.measure(clock, place, work, best) for _ in range(repeats)]
        for impl in measured[0]:
            figures = [m[impl] for m in measured]
            rows.append(
                {"configuration": work.name, "impl": impl, "shape": work.shape, **summarise(figures, list(figures[0]))}
            )
            _log_row(rows[-1])
    return write_report(out, command=command, repeats=repeats, rows=rows, verdicts=[])


def _log_row(row: dict[str, Any]) -> None:
    _log.info(
        "%-16s %-7s %-50s %10.1f us  %8.1f GB/s (%3.0f %% of a copy)  %9.1f GFLOP/s (%3.0f %% of a product)",
        row["configuration"],
        row["impl"],
        row["shape"],
        1e6 * row["seconds"]["median"],
        row["bytes_per_s"]["median"] / 1e9,
        100 * row["of_copy"]["median"],
        row["flop_per_s"]["median"] / 1e9,
        100 * row["of_product"]["median"],
    )
