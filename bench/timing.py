"""How long something takes, for benchmarks."""

import statistics
import time
from collections.abc import Callable


def median_s(work: Callable[[], object], *, trials: int) -> float:
    """Median seconds of `trials` calls, after one that warms up."""
    work()
    seconds = []
    for _ in range(trials):
        began_s = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began_s)
    return statistics.median(seconds)
