"""A user module that loads a judge when it is imported."""

import time

time.sleep(3.0)


def one(**_: object) -> float:
    """Full marks."""
    return 1.0
