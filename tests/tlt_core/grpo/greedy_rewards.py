"""Reward functions that look around, and that take memory.  The response says what for, or how much."""

import os

ENVIRONMENT = dict(os.environ)


def seen_at_import(*, response, **_):
    """How many of the named variables were there when this module was imported?"""
    return float(len(ENVIRONMENT.keys() & set(response.split(","))))


def take(*, response, **_):
    return float(len(bytearray(int(response) * 10**6)) > 0)
