"""Checkpoints of drafter training, small and in the background ("selective asynchronous checkpoint", TLT section 4.3).

One safetensors file: trained parameters and optimizer state as tensors; the buffer's index, the sampler's queue and
counters as JSON in its header.  The target's tensors are not in it, nor are the hidden states: those are files already.
"""

import json
import logging
from collections.abc import Mapping
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tlt_core.items.store import write_atomically

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

    def __init__(self, folder: Path, writer: Executor) -> None:
        """writer: one thread, to which the files that a checkpoint names are submitted before it."""
        self._path, self._writer = folder / _NAME, writer
        self._latest: Future[None] | None = None

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
        """Write in the background; replaces a save that still waits.  values: JSON values.  parts: copies, on any
        device; nobody may change them any more."""
        tensors = {f"{part}/{name}": tensor for part, own in parts.items() for name, tensor in own.items()}
        metadata = {"values": json.dumps(values)}  # now: what the values are made of may change

        def write(partial: Path) -> None:
            save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, partial, metadata=metadata)

        if self._latest is not None and not self._latest.cancel():
            self._warn(self._latest)
        self._latest = self._writer.submit(write_atomically, self._path, write)

    def close(self) -> None:
        """Wait for what is being written."""
        self._writer.shutdown()
        if self._latest is not None:
            self._warn(self._latest)

    def _warn(self, save: Future[None]) -> None:
        if save.done() and (error := save.exception()) is not None:
            log.warning(
                "the drafter's training state could not be saved: %s: not written (%s); the file before it, if any, is "
                "whole.  Free disk space or give another folder",
                self._path,
                error,
            )


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
