"""Types of command-line options: a value out of range is refused before anything starts."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def whole(least: int, most: int) -> Callable[[str], int]:
    """An integer from `least` to `most`."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text!r}: give a whole number from {least} to {most}")
        return value

    return read


def real(least: float, most: float, *, above: bool = False) -> Callable[[str], float]:
    """A finite number from `least` (above: greater than it) to `most`."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most or (above and value <= least):
            raise argparse.ArgumentTypeError(
                f"{text!r}: give a number {'above' if above else 'from'} {least:g} {'up ' if above else ''}to {most:g}"
            )
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
