"""Types of command-line options: a value out of range is refused before anything starts."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def number(kind: type[int] | type[float], least: float, most: float, *, above: bool = False) -> Callable[[str], float]:
    """Reads an int or a finite float from `least` (above: greater than it) to `most`."""

    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = kind(least - 1)
        if not least <= value <= most or (above and value <= least):
            what = "whole number" if kind is int else "number"
            bounds = f"above {least:g} up to {most:g}" if above else f"from {least:.16g} to {most:.16g}"
            raise argparse.ArgumentTypeError(f"{text!r}: give a {what} {bounds}")
        return value

    return read


def json_object(text: str) -> dict[str, Any]:
    """Names with values, as JSON."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r}: give a JSON object, such as '{{\"enable_thinking\": false}}'")
    return value


def output_file(text: str) -> Path:
    """Where a file can be written: not a folder, and its folder is one or can be made."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder: name a file, such as {path / 'responses.jsonl'}")
    parent = next(p for p in path.absolute().parents if p.exists())
    if not parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: {parent} is a file; name a file in a folder")
    return path
