"""Environments of the engines that ours is compared with.  Each is made when it is first needed.

    artifacts/peers/NAME-DIGEST/        DIGEST: of the pinned packages, so that a changed pin makes a new environment
        bin/python ...
        .made                           written last: without it the environment is made again

Every package is named and installed without dependencies, so nothing else is installed.  Ours stays as it is.
"""

import hashlib
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from tlt_core.machine import file_lock

_MADE = ".made"
_ERROR_CHARACTERS = 300

_log = logging.getLogger(__name__)


class PeerError(Exception):
    """A peer cannot be measured here.  The text says why."""


class Peer(NamedTuple):
    """What to install.  Peer("llama.cpp", "", ("xllamacpp==1.2.3",))"""

    name: str
    torch: str  # installed first, with its dependencies; empty: none
    packages: tuple[str, ...]


def interpreter(peer: Peer, under: Path) -> Path:
    """Python of the peer's environment in the folder `under`, which is made if it is missing.  Raises PeerError."""
    digest = hashlib.sha256(repr((peer, sys.version_info[:2])).encode()).hexdigest()[:12]
    folder = (under / f"{peer.name}-{digest}").absolute()
    python = folder / "bin" / "python"
    try:
        with file_lock.exclusive(under / f".{folder.name}.lock", wait=True):
            if not (folder / _MADE).is_file():
                _log.info("making the environment of %s in %s, once", peer.name, folder)
                _make(peer, folder, python)
    except OSError as error:
        raise PeerError(f"the environment {folder} cannot be made: {error}") from None
    return python


def variables(*, threads: int) -> dict[str, str]:
    """Environment variables for a peer's process: ours, without those that lead to our packages."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return kept | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}


def run(command: list[str], *, purpose: str) -> None:
    """Run a command.  Raises PeerError with the end of its output if it fails."""
    done = subprocess.run(
        command,
        env=variables(threads=1),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())[-_ERROR_CHARACTERS:]
        raise PeerError(f"{purpose} failed (exit code {done.returncode}): {said}")


def _make(peer: Peer, folder: Path, python: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # remains of an interrupted process
    purpose = f"making the environment of {peer.name}"
    run([sys.executable, "-m", "venv", str(folder)], purpose=purpose)
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if peer.torch:
        run([*install, peer.torch], purpose=purpose)
    run([*install, "--no-deps", *peer.packages], purpose=purpose)
    (folder / _MADE).touch()
