"""Checkpoints of drafter training, small and in the background ("selective asynchronous checkpoint", TLT section 4.3).

One safetensors file: trained parameters and optimizer state as tensors; the buffer's index, the sampler's queue and
counters as JSON in its header.  The target's tensors are not in it, nor are the hidden states: those are files already.
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tlt_core.idle_training.writer import BackgroundWriter, WriteJob

log = logging.getLogger(__name__)

_NAME = "training.safetensors"


class IdleTrainingCheckpoint(NamedTuple):
    """What was saved."""

    tensors: dict[str, Tensor]
    values: dict[str, Any]

    def part(self, name: str) -> dict[str, Tensor]:
        """The tensors of one part, see `TrainingCheckpoint.save`."""
        prefix = f"{name}/"
        return {key.removeprefix(prefix): tensor for key, tensor in self.tensors.items() if key.startswith(prefix)}


class IdleTrainingCheckpointError(ValueError):
    """A checkpoint that cannot be read.  The text names it and the remedy."""


class TrainingCheckpoint:
    """The one checkpoint of a worker's training.  A failure is logged: it costs the drafter's progress, not the run."""

    def __init__(self, folder: Path, writer: BackgroundWriter) -> None:
        self._path, self._writer = folder / _NAME, writer
        self._latest: WriteJob | None = None

    def load(self) -> IdleTrainingCheckpoint | None:
        """What was saved last; None where there is nothing, or nothing that can be read."""
        if not self._path.is_file():
            return None
        try:
            return load_checkpoint(self._path)
        except IdleTrainingCheckpointError as error:
            log.warning("%s; the drafter's training starts anew", error)
            return None

    def save(self, values: Mapping[str, Any], **parts: Mapping[str, Tensor]) -> None:
        """Write in the background.  Nobody may change the tensors any more."""
        tensors = {f"{part}/{name}": tensor for part, own in parts.items() for name, tensor in own.items()}
        self._warn()  # of an earlier save
        self._latest = async_checkpoint(self._writer, self._path, tensors, values)

    def close(self) -> None:
        """Wait for what is being written."""
        self._writer.close()
        self._warn()

    def _warn(self) -> None:
        if self._latest is not None and self._latest.error is not None:
            log.warning(
                "the drafter's training state could not be saved: %s: not written (%s); the file before it, if any, is "
                "whole.  Free disk space or give another folder",
                self._path,
                self._latest.error,
            )


def async_checkpoint(
    writer: BackgroundWriter, path: Path, tensors: Mapping[str, Tensor], values: Mapping[str, Any]
) -> WriteJob:
    """Write a checkpoint in the background; returns at once.

    tensors: copies, on any device; nobody may change them any more.  values: JSON values.
    """
    metadata = {"values": json.dumps(values)}  # now: what the values are made of may change
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}

    def write(partial: Path) -> None:
        save_file({name: tensor.cpu() for name, tensor in contiguous.items()}, partial, metadata=metadata)

    return writer.submit(path, write)


def load_checkpoint(path: Path) -> IdleTrainingCheckpoint:
    """Read a checkpoint.  Raises IdleTrainingCheckpointError."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (not a mapping)
            return IdleTrainingCheckpoint(tensors, json.loads(file.metadata()["values"]))
    except (OSError, SafetensorError, TypeError, KeyError, ValueError) as error:
        raise IdleTrainingCheckpointError(
            f"{path} cannot be read ({error}); remove it, and drafter training starts from the drafter in use"
        ) from None
