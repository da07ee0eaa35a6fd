"""Reward functions that misbehave, each on the responses to the prompts that fall to it."""

import contextlib
import os
import signal
import time
import zlib
from collections.abc import Callable

from tests.flows.length_reward import length_reward

_BYTES = 3_000_000_000  # more than the test allows a scoring process


def patient(*, response: str, **_: object) -> float:
    """A judge that takes a moment, so that the phase `reward` lasts."""
    time.sleep(0.02)
    return length_reward(response=response)


def _raise() -> float:
    raise RuntimeError("the judge is out of order")


def _hang() -> float:
    time.sleep(3600)
    return 1.0


def _hang_deaf() -> float:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        with contextlib.suppress(BaseException):  # this is the misdeed
            time.sleep(3600)


def _kill() -> float:
    os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def _leave() -> float:
    os._exit(0)


def _fill() -> float:
    return float(len(bytearray(_BYTES)))


MISDEEDS: dict[str, Callable[[], object]] = {
    "raises": _raise,
    "hangs": _hang,
    "hangs and ignores SIGTERM": _hang_deaf,
    "returns NaN": lambda: float("nan"),
    "returns 1e39": lambda: 1e39,
    "returns text": lambda: "good",
    "kills its process": _kill,
    "ends its process with exit code 0": _leave,
    "takes 3 GB": _fill,
}


def misdeed_of(response: str) -> str:
    """Which misdeed falls to a response; empty: none."""
    names = ["", *MISDEEDS]
    return names[zlib.crc32(response.encode()) % len(names)]


def misbehaving(*, response: str, **_: object) -> object:
    name = misdeed_of(response)
    return MISDEEDS[name]() if name else 1.0
