"""`provenance.json`: where an exported folder comes from, what it was made for, and the digest of each of its files.

A drafter belongs to a target, named by two digests: of its weights and of its tokenizer.  Folders with equal digests
are the same model for a drafter, wherever they are and whatever else they hold.
"""

import hashlib
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from conf.run import RunConfig
from tlt_core.data import dataset
from tlt_core.export.contents import PROVENANCE
from tlt_core.items.store import sha256_of
from tlt_core.machine import doctor, provenance
from tlt_core.model.config import ModelError
from tlt_core.model.load import load_config, load_tokenizer

_SAMPLE_TEXT = "def f(x):\n    return {'\u00e9t\u00e9': 3.14 * x, \"a  b\": [x]}  # 12345 \u4f60\u597d\n"
_TOLD = ("started", "commit", "precision")  # of each attempt


@dataclass(frozen=True, slots=True)
class Source:
    policy: Path
    drafter: Path | None  # None: the policy alone
    data_dir: Path
    step: int | None  # RL steps that the policy was trained for; None: unknown
    run_dir: Path | None = None  # folder with the run's own records; None: the configuration's


def origin(cfg: RunConfig, source: Source) -> dict[str, Any]:
    """What the records of policy and drafter have in common.  Raises DataError, StoreError."""
    machine = doctor.machine()
    manifest = dataset.read_manifest(source.data_dir)
    run_dir = source.run_dir or cfg.run_dir
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
            "system_prompt": cfg.data.system_prompt,
            "mlflow_run_id": provenance.tracker_run_id(run_dir),
            "attempts": [
                {name: a[name] for name in _TOLD if name in a} | {"argv": _without_secrets(a["argv"])}
                for a in provenance.attempts(run_dir)
            ],
        },
        "dataset": {
            "digest": manifest.digest,
            "generator": manifest.generator,
            "tasks": sorted(manifest.tasks),
            "counts": manifest.counts,
        },
    }


def _without_secrets(argv: Sequence[str]) -> list[str]:
    """An export goes to other people, and a command line may hold `tracking.uri=https://user:password@host`."""
    return [re.sub(r"//[^/@\s]+@", "//***@", word) for word in argv]


def identity(policy: Path) -> dict[str, Any]:
    """What names a target in the drafter's record.  Raises ModelError."""
    config = load_config(policy)
    return {
        "weights_sha256": weights_digest(policy),
        "tokenizer_sha256": tokenizer_digest(policy),
        "family": config.family,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "num_layers": config.num_layers,
    }


def weights_digest(folder: Path) -> str:
    """Over the names and bytes of the folder's safetensors files.  Raises ModelError when there are none."""
    files = {path.name: sha256_of(path) for path in sorted(folder.glob("*.safetensors"))}
    if not files:
        raise ModelError(f"{folder} holds no safetensors; give the Hugging Face folder of the target")
    return _digest(files)


def tokenizer_digest(folder: Path) -> str:
    """Over the vocabulary and the tokens of a sample text, which is what token ids mean.  Raises ModelError.

    The files themselves may differ between copies in settings that change no token (padding, chat template).
    """
    tokenizer = load_tokenizer(folder)
    sample = tokenizer.encode(_SAMPLE_TEXT, add_special_tokens=False)
    return _digest([sorted(tokenizer.get_vocab().items()), sample])


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Write `provenance.json` with the digest of every other file of the folder: call it last."""
    files = {path.name: sha256_of(path) for path in sorted(folder.iterdir())}
    write_json(folder / PROVENANCE, {**record, "files": files})


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Indented, for people.  Raises ModelError that names a number that is not finite."""
    for name, value in _numbers(content, ""):
        if not math.isfinite(value):
            raise ModelError(f"{name} for {path.name} is {value}: what was measured is unsound; measure or train again")
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")


def _numbers(content: Any, name: str) -> Iterator[tuple[str, float]]:
    """All numbers in nested JSON values, with the path to each."""
    if isinstance(content, int | float):
        yield name, content
    elif isinstance(content, Mapping):
        for key, value in content.items():
            yield from _numbers(value, f"{name}.{key}" if name else str(key))
    elif isinstance(content, list | tuple):
        for value in content:
            yield from _numbers(value, name)
