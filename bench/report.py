"""`tlt bench`: measurements that a script can judge.

    reports/NAME.json: name, commit, command, machine, repeats,
                       rows      one per configuration: median, min and max of each figure
                       verdicts  claim, value, spread, bound, holds
                       conditions  by hand, afterwards: what disturbed the measurement

A verdict compares the median with its bound, and is written down whether it holds or not.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.verdicts import verdict
from tlt_core.items.store import write_atomically
from tlt_core.machine import doctor, provenance

LIMITS = ("TLT_NATIVE_KERNELS", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")


class Bound(NamedTuple):
    """A claim about one figure."""

    claim: str
    figure: str
    bound: float
    at_least: bool  # else: at most


def judge(measured: Sequence[Mapping[str, float]], claims: Sequence[Bound]) -> list[dict[str, Any]]:
    """One verdict per claim."""
    verdicts = []
    for claim, figure, bound, at_least in claims:
        values = [m[figure] for m in measured]
        judged = verdict(claim, values, bound)
        holds = judged["holds"] if at_least else judged["value"] < bound
        verdicts.append(judged | {"holds": holds})
    return verdicts


def write_report(
    path: Path,
    *,
    command: str,
    repeats: int,
    rows: Sequence[Mapping[str, Any]],
    verdicts: Sequence[Mapping[str, Any]],
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Write a report atomically, and return it.  environment: the variables that change what is measured; None: those
    of this process (`limits_set`)."""
    told = limits_set() if environment is None else dict(environment)
    report = {
        "name": path.stem,
        "commit": provenance.commit(),
        "command": command,
        "machine": doctor.machine(),
        "repeats": repeats,
        **({"environment": told} if told else {}),
        "rows": list(rows),
        "verdicts": list(verdicts),
    }
    write_atomically(path, lambda partial: partial.write_text(json.dumps(report, indent=1) + "\n"))
    return report


def limits_set() -> dict[str, str]:
    """Variables that keep this process from instructions that the processor has."""
    return {name: os.environ[name] for name in LIMITS if name in os.environ}
