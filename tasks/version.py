"""Task: version a folder with DVC, and push it to the remote.

    exports/demo  ->  exports/demo.dvc (its digest, for git)  ->  bytes in DVC's cache and remote

This is the only place that calls DVC.  Processes take turns, where DVC itself would fail.  Outputs of the stages in
dvc.yaml are tracked by `dvc repro`, not here.
"""

import logging
import subprocess
import sys
from pathlib import Path

import yaml
from prefect import task
from prefect.cache_policies import NO_CACHE

from tlt_core.machine.file_lock import exclusive

log = logging.getLogger(__name__)


class VersionError(RuntimeError):
    """A DVC command failed.  The text has its reason."""


@task(task_run_name="version-folder", cache_policy=NO_CACHE)
def version_folder(folder: Path, *, push: bool = True) -> str:
    """Track the folder's present content, and push it; may be repeated.  Returns its MD5.  Raises VersionError."""
    root = project_of(folder)
    with exclusive(root / ".dvc" / "tmp" / "tlt.lock", wait=True):
        _dvc(root, "add", str(folder.absolute()))
        pointer = folder.with_name(f"{folder.name}.dvc")
        if push:
            _dvc(root, "push", str(pointer.absolute()))
    md5 = str(yaml.safe_load(pointer.read_text())["outs"][0]["md5"])
    log.info("%s is version %s; commit %s", folder, md5, pointer)
    return md5


def project_of(folder: Path) -> Path:
    """Root of the folder's DVC project.  Raises VersionError."""
    for parent in folder.absolute().parents:
        if (parent / ".dvc").is_dir():
            return parent
    raise VersionError(f"{folder} is in no DVC project; choose a folder in one, or run 'dvc init' there")


def _dvc(root: Path, *arguments: str) -> None:
    """Run a DVC command; waits for other processes' commands."""
    command = [sys.executable, "-m", "dvc", "--wait-for-lock", *arguments]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise VersionError(f"dvc {arguments[0]} failed: {done.stderr.strip() or done.stdout.strip()}")
