"""Reward functions that misbehave, imported by the scoring processes.  The response says how."""

import os
import sys
import time
from pathlib import Path


class Unprintable(Exception):
    def __str__(self):
        raise ValueError("not even a message")


def hostile(*, response, answer, **_):
    match response:
        case "sleep":
            time.sleep(600)
        case "spin":
            while True:
                pass
        case "crash":
            os._exit(3)
        case "print":
            print("noise on stdout")
            os.write(2, b"noise on stderr\n")
        case "raise":
            raise KeyError("no such thing")
        case "unprintable":
            raise Unprintable
        case "exit":
            sys.exit(2)
        case "interrupt":
            raise KeyboardInterrupt
        case "nan":
            return float("nan")
        case "huge":
            return 1e39
        case "none":
            return None
    return float(answer)


def killed_once(*, answer, response, **_):
    """Its process ends the first time, as if somebody had killed it.  The response names a file that remembers it."""
    if not Path(response).exists():
        Path(response).touch()
        os._exit(-9)
    return float(answer)


def modules(**_):
    """Does a scoring process carry torch?"""
    return float("torch" in sys.modules)
