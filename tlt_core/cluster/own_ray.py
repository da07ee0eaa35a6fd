"""The processes of the Ray that the driver has started for itself.

Without its control server (GCS) a Ray goes on for a minute and then kills the driver silently; its agents stay for
longer.  Without its raylet the workers end, and Ray takes half a minute to say so.  So the driver looks by itself.
"""

import contextlib
from collections.abc import Sequence

import psutil

_SERVERS = ("gcs_server", "raylet")


class OwnRay:
    """Finds them when it is made.  Where the driver has joined a running cluster there are none."""

    def __init__(self) -> None:
        self._servers = {child: name for child in psutil.Process().children() if (name := _name(child)) in _SERVERS}

    def lost(self) -> str:
        """Which server has ended, in words; empty: none."""
        gone = [name for server, name in self._servers.items() if not _is_there(server)]
        return " and ".join(f"Ray's process {name} on this machine" for name in gone)

    def kill(self) -> None:
        """End all of its processes; those of a Ray without its servers do not end by themselves, or late."""
        if not self._servers:
            return
        for process in self._all():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def _all(self) -> Sequence[psutil.Process]:
        """Ray renames its Python processes."""
        family = psutil.Process().children(recursive=True)
        return [p for p in family if (name := _name(p)) in _SERVERS or name.startswith("ray::")]


def _name(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.name()
    return ""


def _is_there(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False
