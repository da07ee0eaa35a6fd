"""Export: a run's policy and drafter as two folders for serving, with their origin and measurements.

    policy   -> copied                                           -> OUT/policy           + provenance.json
    drafter  -> read, measured on held-out prompts, rewritten    -> OUT/drafter-eagle3   + provenance, probe, README

OUT appears whole or not at all; an older export is replaced.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from conf.run import RunConfig
from tlt_core.export import record
from tlt_core.export.drafter_folder import write_drafter
from tlt_core.items.store import write_folder_atomically
from tlt_core.machine.disk import check_space
from tlt_core.model.config import ModelError
from tlt_core.model.load import check_finite

POLICY, DRAFTER = "policy", "drafter-eagle3"  # vLLM infers the method from the folder's name when none is given
_POLICY_FILES = (
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)
KEPT = (".gitignore", f"{POLICY}.dvc", f"{DRAFTER}.dvc")  # written by DVC beside the folders that it tracks
_SPARE_BYTES = 16 << 20


def run(cfg: RunConfig, source: record.Source, *, out_dir: Path, num_prompts: int, verifier: str | None = None) -> Path:
    """Write OUT; returns it.  num_prompts: held-out prompts to measure on (0: measure nothing).

    verifier: target that the drafter's folder names for `vllm serve DRAFTER`; None: the exported policy's path.
    Raises ModelError (weights or figures that are not finite, a drafter that does not fit the policy), StoreError (the
    disk refuses, a damaged record), DataError, SpaceError.
    """
    _check_replaceable(out_dir)
    torch.set_num_threads(cfg.cluster.num_workers * cfg.cluster.threads_per_worker)
    size = sum(path.stat().st_size for folder in (source.policy, source.drafter) if folder for path in folder.iterdir())
    check_space(out_dir, needed_bytes=size + _SPARE_BYTES)
    verifier = verifier or str((out_dir / POLICY).absolute())

    def write(partial: Path) -> None:
        origin = record.origin(cfg, source)
        _write_policy(source.policy, partial / POLICY, origin)
        if source.drafter is not None:
            write_drafter(cfg, source, partial / DRAFTER, origin, verifier=verifier, num_prompts=num_prompts)

    write_folder_atomically(out_dir, write, keep=KEPT)
    return out_dir


def _check_replaceable(out_dir: Path) -> None:
    """A wrong --out must not destroy anything but an older export."""
    others = {p.name for p in out_dir.iterdir()} - {POLICY, DRAFTER, *KEPT} if out_dir.is_dir() else set()
    if others or (out_dir.exists() and not out_dir.is_dir()):
        what = f"holds {min(others)}, which no export does" if others else "is not a folder"
        raise ModelError(f"{out_dir} {what}, so it is not replaced; choose another --out, or remove it")


def _write_policy(policy: Path, folder: Path, origin: Mapping[str, Any]) -> None:
    check_finite(policy)
    folder.mkdir()
    for pattern in _POLICY_FILES:
        for path in sorted(policy.glob(pattern)):
            shutil.copyfile(path, folder / path.name)
    record.write_record(folder, {**origin, "kind": "policy", "target": record.identity(folder)})
