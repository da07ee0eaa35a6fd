"""One process at a time, and a dead one never."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tlt_core.machine.file_lock import Locked, exclusive

HOLD = """
import sys, time
from pathlib import Path
from tlt_core.machine.file_lock import exclusive
with exclusive(Path(sys.argv[1])):
    print("inside", flush=True)
    time.sleep(60)
"""


def _holder(path: Path, *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", HOLD, str(path), *more], stdout=subprocess.PIPE, text=True)


def _inside(process: subprocess.Popen[str]) -> bool:
    assert process.stdout is not None
    return process.stdout.readline() == "inside\n"


def test_the_second_is_told_who_the_first_is_and_enters_when_that_one_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "run" / "lock"
    first = _holder(path)
    try:
        assert _inside(first)
        with pytest.raises(Locked, match=f"process {first.pid} is at work in {path.parent}"), exclusive(path):
            raise AssertionError("two were inside")
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    with exclusive(path):
        assert path.read_text().strip().isdigit()
