"""Reward functions that misbehave, imported by the scoring processes."""

import os
import time


def hang(**_):
    time.sleep(600)


def crash(**_):
    os._exit(3)


def chatty(*, response, **_):
    print("noise on stdout")
    return len(response)


def broken(**_):
    raise KeyError("no such thing")
