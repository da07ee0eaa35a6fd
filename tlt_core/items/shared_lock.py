"""A lock that readers of a file share, and that its remover must have alone.  The kernel frees it at a kill."""

import errno
import fcntl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)  # of a disk without locks, where nothing is protected


@contextmanager
def locked(file: Path, *, exclusively: bool) -> Iterator[str | None]:
    """Hold the file's lock within the block.  Yields why it is not held, None where it is."""
    why_not = None
    with ExitStack() as stack:
        try:  # network disks lock exclusively only what is open for writing
            opened = stack.enter_context(file.open("r+b" if exclusively else "rb"))
            fcntl.flock(opened, (fcntl.LOCK_EX if exclusively else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            why_not = "another process is using it" if exclusively else "another process is removing it"
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                why_not = f"{file.name} cannot be locked ({error})"
        yield why_not
