"""Where Unix sockets are made.  The path of one has at most 107 bytes, and a batch job's TMPDIR may have more."""

import os

SHORT = "/tmp"
_LONGEST = 107  # bytes of a socket's path: Linux's sun_path, less its end


def socket_folder(wanted: str, *, behind: str) -> str:
    """`wanted`; or SHORT where the path of a socket, which goes on with `behind`, would be too long in it."""
    return wanted if len(os.fsencode(wanted + behind)) <= _LONGEST else SHORT
