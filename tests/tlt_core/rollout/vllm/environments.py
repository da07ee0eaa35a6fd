"""Environments that vLLM seems to be installed in."""

import venv
from pathlib import Path


def vllm_environment(folder: Path, package: str, version: str) -> Path:
    """A real environment's interpreter; distribution `package` is there by name, beside our plug-in."""
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python3*/site-packages")
    for name, number in ((package, version), ("vllm-router", "9.9")):
        info = packages / f"{name.replace('-', '_')}-{number}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")
    (packages / "tlt_vllm").mkdir()
    (packages / "tlt_vllm" / "__init__.py").touch()
    return folder / "bin" / "python"
