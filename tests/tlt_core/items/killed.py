"""A process that is killed before its n-th change of the file system, whatever changes it."""

import os
import signal
import sys
import traceback
from collections.abc import Callable

_CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.chmod", "shutil.rmtree", "shutil.copyfile", "open")


def killed_before(number: int, work: Callable[[], object]) -> bool:
    """Do `work` in a process of its own, killed with signal 9 before its change `number`.  False: it made fewer."""
    child = os.fork()
    if child == 0:
        left = number

        def count(event: str, _: object) -> None:
            nonlocal left
            if event not in _CHANGES:
                return
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            sys.addaudithook(count)
            work()
            os._exit(0)
        finally:  # whatever was raised must not go on in this process's tests
            traceback.print_exc()
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or status == 0
    return os.WIFSIGNALED(status)
