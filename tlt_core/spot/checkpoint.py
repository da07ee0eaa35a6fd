"""Checkpoints of drafter training, small and in the background ("selective asynchronous checkpoint", TLT section 4.3).

One safetensors file: trainable parameters and optimizer state as tensors; the buffer's index, the sampler's queue and
counters as JSON in its header.  The target's tensors are not in it, nor are the hidden states: those are files already.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tlt_core.spot.writer import BackgroundWriter, WriteJob


class SpotCheckpoint(NamedTuple):
    """What was saved."""

    tensors: dict[str, Tensor]
    values: dict[str, Any]


class SpotCheckpointError(ValueError):
    """A checkpoint that cannot be read.  The text names it and the remedy."""


def async_checkpoint(
    writer: BackgroundWriter, path: Path, tensors: Mapping[str, Tensor], values: Mapping[str, Any]
) -> WriteJob:
    """Write a checkpoint in the background; returns at once.

    tensors: copies, on any device; nobody may change them any more.  values: JSON values.  Raises WriteError when an
    earlier write failed.
    """
    metadata = {"values": json.dumps(values)}  # now: what the values are made of may change
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    return writer.submit(path, lambda partial: save_file(contiguous, partial, metadata=metadata))


def load_checkpoint(path: Path) -> SpotCheckpoint:
    """Read a checkpoint.  Raises SpotCheckpointError."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (not a mapping)
            return SpotCheckpoint(tensors, json.loads(file.metadata()["values"]))
    except (OSError, SafetensorError, TypeError, KeyError, ValueError) as error:
        raise SpotCheckpointError(
            f"{path} cannot be read ({error}); remove it, and drafter training starts from the drafter in use"
        ) from None
