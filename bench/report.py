"""`tlt bench`: measurements that a script can judge.

reports/NAME.json: name, commit, command, machine, repeats,
                   rows      one per configuration: median, min and max of each figure
                   verdicts  claim, value, spread, bound, holds: the median beside its bound
                   conditions  by hand, afterwards: what disturbed the measurement
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tlt_core.items.store import write_atomically
from tlt_core.machine import doctor, provenance

_LIMITS = ("TLT_NATIVE_KERNELS", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")


def write_report(
    path: Path,
    *,
    command: str,
    repeats: int,
    rows: Sequence[Mapping[str, Any]],
    verdicts: Sequence[Mapping[str, Any]],
    environment: Mapping[str, str] | None = None,
    attempt: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Write a report atomically, and return it.

    environment: the variables that change what is measured; None: those that keep this process from instructions that
    the processor has.  attempt: of the run that was measured: commit and machine are its; None: they are those of now.
    """
    told = {n: os.environ[n] for n in _LIMITS if n in os.environ} if environment is None else dict(environment)
    report = {
        "name": path.stem,
        "commit": attempt["commit"] if attempt else provenance.commit(),
        "command": command,
        "machine": attempt["machine"] if attempt else doctor.machine(),
        "repeats": repeats,
        **({"environment": told} if told else {}),
        "rows": list(rows),
        "verdicts": list(verdicts),
    }
    write_atomically(path, lambda partial: partial.write_text(json.dumps(report, indent=1) + "\n"))
    return report
