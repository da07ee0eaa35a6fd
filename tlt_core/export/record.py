"""`provenance.json`: where an exported folder comes from, what it was made for, and the digest of each of its files."""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from conf.schema import RunConfig
from tlt_core import doctor, provenance
from tlt_core.export.contents import PROVENANCE
from tlt_core.export.digests import tokenizer_digest, weights_digest
from tlt_core.model.load import load_config
from tlt_core.store import sha256_of


@dataclass(frozen=True, slots=True)
class Source:
    """What is exported.  Source(policy=Path("runs/demo/policy"), drafter=..., data_dir=..., step=12)"""

    policy: Path
    drafter: Path | None  # None: the policy alone
    data_dir: Path
    step: int | None  # RL steps that the policy has behind it, where they are known
    run_dir: Path | None = None  # folder with the run's own records; None: the configuration's


def origin(cfg: RunConfig, source: Source) -> dict[str, Any]:
    """What both records begin with."""
    machine = doctor.machine()
    manifest = json.loads((source.data_dir / "manifest.json").read_text(encoding="utf-8"))
    run_dir = source.run_dir or cfg.run_dir
    record = run_dir / "run.json"
    attempts = json.loads(record.read_text(encoding="utf-8")).get("attempts", []) if record.is_file() else []
    return {
        "format": "tlt-export-1",
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": provenance.commit(),
        "command": _without_secrets([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "versions": machine.pop("versions"),
        "machine": machine,
        "run": {
            "name": cfg.name,
            "step": source.step,
            "seed": cfg.seed,
            "mlflow_run_id": provenance.tracker_run_id(run_dir),
            "attempts": [
                {name: a[name] for name in ("started", "commit", "precision") if name in a}
                | {"argv": _without_secrets(a["argv"])}
                for a in attempts
            ],
        },
        "dataset": {
            "digest": manifest["digest"],
            "generator": manifest["generator"],
            "tasks": sorted(manifest["tasks"]),
            "counts": manifest["counts"],
        },
    }


def _without_secrets(argv: Sequence[str]) -> list[str]:
    """An export goes to other people: `tracking.uri=https://user:password@host` may stand in a command line."""
    return [re.sub(r"//[^/@\s]+@", "//***@", word) for word in argv]


def identity(policy: Path) -> dict[str, Any]:
    """What makes a folder the target of a drafter.  Raises ModelError."""
    config = load_config(policy)
    return {
        "weights_sha256": weights_digest(policy),
        "tokenizer_sha256": tokenizer_digest(policy),
        "family": config.family,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "num_layers": config.num_layers,
    }


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Add the digest of every file of the folder, and write `provenance.json` there: last of all."""
    files = {path.name: sha256_of(path) for path in sorted(folder.iterdir())}
    write_json(folder / PROVENANCE, {**record, "files": files})


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """As people read it."""
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")
