"""Export: a run's policy and drafter as two folders that serving teams load, with their origin and measurements.

    policy   -> copied                                           -> OUT/policy           + provenance.json
    drafter  -> read, measured on held-out prompts, written anew -> OUT/drafter-eagle3   + provenance, probe, README

OUT appears whole, or not at all; an older export is replaced.
"""

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from conf.schema import RunConfig
from tlt_core import preflight
from tlt_core.export import record
from tlt_core.export.drafter_folder import write_drafter
from tlt_core.model.config import ModelError

POLICY, DRAFTER = "policy", "drafter-eagle3"  # vLLM takes the method from the folder's name, where none is given
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
KEPT = (".gitignore", f"{POLICY}.dvc", f"{DRAFTER}.dvc")  # DVC writes them beside what it tracks
_SPARE_BYTES = 16 << 20


def run(cfg: RunConfig, source: record.Source, *, out_dir: Path, num_prompts: int, verifier: str | None = None) -> Path:
    """Write OUT; returns it.  num_prompts: held-out prompts to measure on, 0: nothing is measured.

    verifier: target that the drafter's folder names for `vllm serve DRAFTER`; None: the exported policy's path.
    Raises ModelError (a drafter that does not fit, a disk that refuses), SpaceError.
    """
    _check_replaceable(out_dir)
    torch.set_num_threads(cfg.cluster.num_workers * cfg.cluster.threads_per_worker)
    size = sum(path.stat().st_size for folder in (source.policy, source.drafter) if folder for path in folder.iterdir())
    preflight.check_space(out_dir, needed_bytes=size + _SPARE_BYTES)
    verifier = verifier or str((out_dir / POLICY).absolute())

    def write(partial: Path) -> None:
        origin = record.origin(cfg, source)
        _write_policy(source.policy, partial / POLICY, origin)
        if source.drafter is not None:
            write_drafter(cfg, source, partial / DRAFTER, origin, verifier=verifier, num_prompts=num_prompts)

    _write_tree_atomically(out_dir, write)
    return out_dir


def _check_replaceable(out_dir: Path) -> None:
    """A slip in --out must not cost anything but an older export."""
    others = {p.name for p in out_dir.iterdir()} - {POLICY, DRAFTER, *KEPT} if out_dir.is_dir() else set()
    if others or (out_dir.exists() and not out_dir.is_dir()):
        what = f"holds {min(others)}, which no export does" if others else "is not a folder"
        raise ModelError(f"{out_dir} {what}, so it is not replaced; choose another --out, or remove it")


def _write_policy(policy: Path, folder: Path, origin: Mapping[str, Any]) -> None:
    folder.mkdir()
    for pattern in _POLICY_FILES:
        for path in sorted(policy.glob(pattern)):
            shutil.copyfile(path, folder / path.name)
    record.write_record(folder, {**origin, "kind": "policy", "target": record.identity(folder)})


def _write_tree_atomically(out_dir: Path, write: Callable[[Path], None]) -> None:
    """Call `write` with a temporary folder beside `out_dir`, flush its files, rename it.  An older one comes back when
    the renaming fails.  Raises ModelError where the disk refuses."""
    partial = out_dir.with_name(f".{out_dir.name}.partial-{os.getpid()}")
    former = out_dir.with_name(f".{out_dir.name}.former-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        write(partial)
        for path in (p for p in partial.rglob("*") if p.is_file()):
            path.chmod(0o644)  # safetensors keeps its files to their owner; these are for others
            with path.open("rb") as file:
                os.fsync(file.fileno())
        if out_dir.exists():
            for name in (n for n in KEPT if (out_dir / n).is_file()):
                shutil.copyfile(out_dir / name, partial / name)
            out_dir.rename(former)
        try:
            partial.rename(out_dir)
        except OSError:
            if former.exists():
                former.rename(out_dir)
            raise
    except OSError as error:
        raise ModelError(f"{out_dir} cannot be written ({error}); free some space or choose another --out") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(former, ignore_errors=True)
