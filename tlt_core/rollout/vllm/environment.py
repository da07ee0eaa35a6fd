"""vLLM's own Python environment (`make vllm-env`): its interpreter, and the variables of processes that run in it.

Nothing of vLLM is imported by this package: its pinned packages do not fit ours.
"""

import os
from pathlib import Path


def vllm_python() -> Path:
    """Interpreter of vLLM's environment: $VLLM_PYTHON, or where `make vllm-env` puts it.  It need not exist."""
    return Path(os.environ.get("VLLM_PYTHON", ".venv-vllm/bin/python")).absolute()


def environment(python: Path, *, threads: int) -> dict[str, str]:
    """Variables for a process that runs vLLM on `threads` threads.

    It sees its own environment's packages alone, and uses the OpenMP runtime that vLLM recommends where there is one.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV", "VLLM"))}
    openmp = python.parents[1] / "lib" / "libiomp5.so"
    return kept | {
        "PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        **({"LD_PRELOAD": str(openmp), "KMP_BLOCKTIME": "5"} if openmp.is_file() else {}),
    }
