"""What a run was made with: resolved configuration, commit, versions, command line.  Written before anything else.

runs/NAME/config.yaml    loadable again
runs/NAME/run.json       one entry per attempt (a resumed run has several), and the tracker's run id; an attempt has the
                         seconds that its stages were forecast to take and, once it has ended, took
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from conf.schema import RunConfig
from tlt_core import doctor
from tlt_core.machine.precision import Precision
from tlt_core.store import write_atomically


def commit() -> str:
    """Commit of the code that is running, `-dirty` when it was changed since; `unknown` outside a git checkout."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True, timeout=10)
        status = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return head.stdout.strip() + ("-dirty" if status.stdout.strip() else "")


def begin_attempt(cfg: RunConfig, *, forecast_s: Mapping[str, float]) -> None:
    """Write `config.yaml`, and add this attempt to `run.json`.  forecast_s: by stage.  Raises OSError."""
    resolved = yaml.safe_dump(cfg.model_dump(mode="json"), sort_keys=False)
    write_atomically(cfg.run_dir / "config.yaml", lambda partial: partial.write_text(resolved))
    record = _read(cfg.run_dir)
    attempt = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "argv": sys.argv,
        "precision": Precision.of(cfg)._asdict(),
        "machine": doctor.machine(),
        "forecast_s": _rounded(forecast_s),
    }
    _write(cfg.run_dir, {**record, "attempts": [*record.get("attempts", []), attempt]})


def end_attempt(run_dir: Path, *, took_s: Mapping[str, float]) -> None:
    """Note what the newest attempt's stages took."""
    record = _read(run_dir)
    *earlier, newest = record["attempts"]
    _write(run_dir, {**record, "attempts": [*earlier, {**newest, "took_s": _rounded(took_s)}]})


def tracker_run_id(run_dir: Path) -> str:
    """Run id that the tracker gave an earlier attempt; empty when there was none."""
    return str(_read(run_dir).get("tracker_run_id", ""))


def keep_tracker_run_id(run_dir: Path, run_id: str) -> None:
    """Remember the tracker's run from its first moment on: the first checkpoint may be far away."""
    _write(run_dir, {**_read(run_dir), "tracker_run_id": run_id})


def _read(run_dir: Path) -> dict[str, Any]:
    path = run_dir / "run.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def _write(run_dir: Path, record: dict[str, Any]) -> None:
    text = json.dumps(record, indent=1)
    write_atomically(run_dir / "run.json", lambda partial: partial.write_text(text))


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 1) for name, value in seconds.items()}
