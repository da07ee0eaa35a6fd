"""A stage's report: a file that is written anew with each row, so that a stage that is ended has said what it knows."""

import json
import os
import platform
import subprocess
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "triton", "transformers", "pytest", "ray", "prefect", "mlflow", "deepspeed", "flash-attn", "vllm")


class Report:
    """OUT/STAGE.json: as `bench.report.write_report`, without what that imports."""

    def __init__(self, path: Path, *, command: str) -> None:
        self._path = path
        self.content: dict[str, Any] = {
            "name": path.stem,
            "commit": commit(),
            "command": command,
            "machine": machine(),
            "outcome": "not ended",
        }
        self.write([], [])

    def write(self, rows: Sequence[Mapping[str, Any]], verdicts: Sequence[Mapping[str, Any]]) -> None:
        """In place of what was there."""
        self.content |= {"rows": list(rows), "verdicts": list(verdicts)}
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(self.content, indent=1, default=str) + "\n")
        partial.replace(self._path)

    def add(self, row: Mapping[str, Any] | None = None, *verdicts: Mapping[str, Any]) -> None:
        """One more row, and verdicts."""
        rows = [] if row is None else [row]
        self.write([*self.content["rows"], *rows], [*self.content["verdicts"], *verdicts])


class Stage(NamedTuple):
    """What the work of a stage gets."""

    report: Report
    device: str  # cpu or cuda
    folder: Path  # empty; what of it is small goes into the archive
    ends: float  # time.monotonic() at which it is ended

    def left_s(self) -> float:
        """Until then."""
        return self.ends - time.monotonic()


def machine() -> dict[str, Any]:
    """What runs this."""
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "gpus": gpus,
        "driver": _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if gpus else "",
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
    }


def commit() -> str:
    """Outside a clone what $TLT_COMMIT says, or `unknown`: as `tlt_core.machine.provenance.commit`."""
    changed = "-dirty" if _said("git", "status", "--porcelain", "-uno") else ""
    return (_said("git", "rev-parse", "HEAD") + changed) or os.environ.get("TLT_COMMIT", "unknown")


def _said(*command: str) -> str:
    """Empty where the program is missing or fails."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
