"""What a run was made with: its config.yaml, and run.json with the tracker's run id and an entry for each attempt."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from conf.run import RunConfig
from tlt_core.items.store import read_json, write_atomically
from tlt_core.machine import doctor
from tlt_core.machine.precision import Precision

_RECORD = threading.Lock()  # for run.json: the tracker's thread writes it, too


def commit() -> str:
    """Commit of the running code, with `-dirty` when files have changed since.  Outside a git checkout it is what
    TLT_COMMIT says (an image knows its own), or `unknown`."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True, timeout=10)
        status = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return os.environ.get("TLT_COMMIT", "unknown")
    return head.stdout.strip() + ("-dirty" if status.stdout.strip() else "")


def begin_attempt(cfg: RunConfig) -> None:
    """Write `config.yaml` and add this attempt to `run.json`.  Raises OSError, and StoreError where `run.json` is
    damaged."""
    resolved = yaml.safe_dump(cfg.model_dump(mode="json"), sort_keys=False)
    write_atomically(cfg.run_dir / "config.yaml", lambda partial: partial.write_text(resolved))
    attempt = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "argv": sys.argv,
        "precision": Precision.of(cfg)._asdict(),
        "machine": doctor.machine(),
    }
    with _RECORD:
        record = _read(cfg.run_dir)
        _write(cfg.run_dir, {**record, "attempts": [*record.get("attempts", []), attempt]})


def end_attempt(run_dir: Path, *, took_s: Mapping[str, float]) -> None:
    """Add the seconds that the newest attempt's stages have taken."""
    took = {name: round(seconds, 1) for name, seconds in took_s.items()}
    with _RECORD:
        record = _read(run_dir)
        *earlier, newest = record["attempts"]
        _write(run_dir, {**record, "attempts": [*earlier, {**newest, "took_s": took}]})


def attempts(run_dir: Path) -> list[dict[str, Any]]:
    """The attempts so far; none where there is no record.  Raises StoreError where it is damaged."""
    found: list[dict[str, Any]] = _read(run_dir).get("attempts", [])
    return found


def tracker_run_id(run_dir: Path) -> str:
    """Run id that the tracker gave an earlier attempt; empty if there was none."""
    return str(_read(run_dir).get("tracker_run_id", ""))


def keep_tracker_run_id(run_dir: Path, run_id: str) -> None:
    """Remember the tracker's run at once: the first checkpoint may be far away."""
    with _RECORD:
        _write(run_dir, {**_read(run_dir), "tracker_run_id": run_id})


def _read(run_dir: Path) -> dict[str, Any]:
    path = run_dir / "run.json"
    remedy = "put an older copy there, or remove it: the run then goes on, as a new run of the tracker"
    return read_json(path, remedy=remedy) if path.is_file() else {}


def _write(run_dir: Path, record: dict[str, Any]) -> None:
    text = json.dumps(record, indent=1)
    write_atomically(run_dir / "run.json", lambda partial: partial.write_text(text))
