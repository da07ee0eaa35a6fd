"""What an exported folder may hold: plain files of known kinds, exactly those that its `provenance.json` lists.

These checks come before any file is loaded, so no file that is refused here has been opened as what it claims to be.
"""

import json
from pathlib import Path
from typing import Any

from tlt_core.items.store import sha256_of

PROVENANCE = "provenance.json"
_KINDS = (".safetensors", ".json", ".md", ".txt", ".jinja", ".model")  # .model: SentencePiece, a plain protobuf
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".npy", ".npz")
_CODE = (".py", ".pyc", ".so", ".sh")


class Refused(ValueError):
    """An export that must not be served.  The text names the reason and the remedy."""


def check_contents(folder: Path) -> str:
    """Plain files of known kinds, no links, no paths that lead out of the folder.  Raises Refused."""
    if not folder.is_dir():
        raise Refused(f"{folder} is not a folder; give the folder that 'tlt export' wrote")
    names = sorted(path.name for path in folder.iterdir())
    for name in names:
        _check_kind(folder / name)
    for name in (n for n in names if n.endswith(".json")):
        content = read_json(folder / name)
        if name.endswith(".index.json"):
            _check_index(folder, name, content)
        if isinstance(content, dict) and "auto_map" in content:
            raise Refused(
                f"{name} has the key auto_map, which makes loaders run code from the folder; remove it: no model of "
                "this project needs code of its own"
            )
    return f"{len(names)} plain files of known kinds, no links"


def _check_kind(path: Path) -> None:
    if path.is_symlink():
        raise Refused(
            f"{path.name} is a link to {path.readlink()}, out of the folder's control; copy the files themselves "
            "('cp -rL', or DVC's cache.type 'copy')"
        )
    if not path.is_file():
        raise Refused(f"{path.name} is not a plain file; an exported folder has no subfolders or devices: remove it")
    suffix = path.suffix.lower()
    if suffix in _PICKLES:
        raise Refused(
            f"{path.name} is a pickle or may hold one, which runs code when it is read; remove it, or convert it to "
            "safetensors: servers may prefer it to the safetensors file beside it"
        )
    if suffix in _CODE:
        raise Refused(f"{path.name} is code, which loaders may run; remove it: no export of this project has any")
    if suffix not in _KINDS:
        raise Refused(f"{path.name} is of no kind that an export has ({', '.join(_KINDS)}); remove it")


def _check_index(folder: Path, name: str, content: Any) -> None:
    shards = content.get("weight_map", {}) if isinstance(content, dict) else None
    if not isinstance(shards, dict):
        raise Refused(f"{name} has no table of tensors (weight_map); export again")
    for tensor, shard in shards.items():
        if not isinstance(shard, str) or not _is_plain_name(shard) or not shard.endswith(".safetensors"):
            raise Refused(
                f"{name} takes {tensor} from {shard!r}, which is not a safetensors file of this folder; export again, "
                "and do not load this folder"
            )
        if not (folder / shard).is_file():
            raise Refused(f"{name} takes {tensor} from {shard}, which does not exist; copy the folder again")


def _is_plain_name(name: str) -> bool:
    return bool(name) and Path(name).name == name and "\\" not in name


def check_digests(folder: Path) -> str:
    """Every file is the one that was exported, and none is missing or new.  Raises Refused."""
    record = read_provenance(folder)
    listed = record.get("files")
    if not isinstance(listed, dict) or not all(isinstance(name, str) and _is_plain_name(name) for name in listed):
        odd = [n for n in listed if not _is_plain_name(n)] if isinstance(listed, dict) else listed
        raise Refused(f"{PROVENANCE} lists files {odd!r}, not names of files in this folder; export again")
    present = {path.name for path in folder.iterdir()} - {PROVENANCE}
    if missing := sorted(listed.keys() - present):
        raise Refused(f"{missing[0]} is missing, though {PROVENANCE} lists it; copy the folder again")
    if new := sorted(present - listed.keys()):
        raise Refused(f"{new[0]} is not listed in {PROVENANCE}: it was put there after the export; remove it")
    for name, expected in sorted(listed.items()):
        if sha256_of(folder / name) != expected:
            raise Refused(
                f"{name} is not the file that was exported (its sha256 differs from {PROVENANCE}); copy the folder "
                "again, or export again after a wanted change"
            )
    return f"{len(listed)} files as exported (sha256)"


def read_provenance(folder: Path) -> dict[str, Any]:
    """The folder's record.  Raises Refused."""
    if not (folder / PROVENANCE).is_file():
        raise Refused(f"{folder} has no {PROVENANCE}, so nothing says where it comes from; export it with 'tlt export'")
    record = read_json(folder / PROVENANCE)
    if not isinstance(record, dict):
        raise Refused(f"{PROVENANCE} must hold a JSON object, found {type(record).__name__}; export again")
    return record


def read_json(path: Path) -> Any:
    """Raises Refused where the file is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise Refused(f"{path.name} is not readable as JSON ({error}); copy the folder again") from None
