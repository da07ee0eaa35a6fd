"""vLLM's own Python environment (`make vllm-env`): its interpreter, and the variables of processes that run in it.

Nothing of vLLM is imported by this package: its pinned packages do not fit ours.
"""

import os
import re
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path

from tlt_core.machine.socket_folder import socket_folder


def vllm_python() -> Path:
    """Interpreter of vLLM's environment: $VLLM_PYTHON, or where `make vllm-env` puts it.  It need not exist."""
    return Path(os.environ.get("VLLM_PYTHON", ".venv-vllm/bin/python")).absolute()


def installed_version(python: Path) -> str:
    """Of vLLM beside this interpreter, without starting it; empty where there is none."""
    found = sorted(python.parents[1].glob("lib/python3*/site-packages/vllm*.dist-info"))
    named = [re.fullmatch(r"vllm(?:_cpu)?-(.+)\.dist-info", folder.name) for folder in found]
    return next((match[1] for match in named if match), "")


def environment(python: Path, *, threads: int, devices: Sequence[str] = ()) -> dict[str, str]:
    """Variables for a process that runs vLLM on `threads` threads.  devices: GPUs that it sees; none: the caller's.

    It sees its own environment's packages alone, and uses the OpenMP runtime that vLLM recommends where there is one.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV", "VLLM"))}
    openmp = python.parents[1] / "lib" / "libiomp5.so"
    return kept | {
        "PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "TQDM_DISABLE": "1",  # its output is a file
        "VLLM_RPC_BASE_PATH": socket_folder(tempfile.gettempdir(), behind=f"/{uuid.uuid4()}"),
        "HF_HUB_OFFLINE": "1",
        **({"CUDA_VISIBLE_DEVICES": ",".join(devices)} if devices else {}),
        **({"LD_PRELOAD": str(openmp), "KMP_BLOCKTIME": "5"} if openmp.is_file() else {}),
    }
