"""How far this process has got: a number that grows with each decoding round, training pass or piece of training.

The heartbeat reads it from another thread (`cluster/heartbeat`).
"""

from pathlib import Path

STACKS_WANTED = Path("stacks") / "wanted"  # below a run's folder: this file, when made, asks for all stacks
_done = 0


def got_on() -> None:
    """Call it in loops that may take long.  By one thread."""
    global _done
    _done += 1


def how_far() -> int:
    return _done
