"""What the drafter is trained on, as it is kept: one response with its hidden states, and files of many.

    StoredSequence --write_sequences--> seqs_000012.safetensors --map_sequences--> StoredSequence, not in memory

Shapes: L tokens, prompt included; P = L - first sampled tokens; E tapped width, D hidden size.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tlt_core.types import NoiseKey

_TENSORS = ("tokens_L", "taps_LE", "last_PD", "lognorms_P")


class SequenceFileError(ValueError):
    """A file of sequences that cannot be used.  The text says why."""


@dataclass(frozen=True, slots=True)
class StoredSequence:
    """One finished response as the target saw it.

    Five tokens, two of them sampled: tokens_L=[1, 9, 4, 7, 2], first=3, taps_LE of positions 0 .. 3, last_PD and
    lognorms_P of positions 2 and 3, which tokens 3 and 4 were sampled from.
    """

    key: NoiseKey
    step: int  # RL step
    policy_version: int
    stream: int  # base of its noise, `sampling.stream_key`
    first: int  # prompt tokens
    tokens_L: Tensor  # int32
    taps_LE: Tensor  # of positions 0 .. L - 2 at least: the target never runs the last token
    last_PD: Tensor  # hidden states after the final norm, in the dtype of the taps
    lognorms_P: Tensor  # float32, of the target's logits at temperature 1
    id: str = field(init=False)  # the same in every run with this seed: seed, step, prompt, sample, as "0.12.3.1"
    nbytes: int = field(init=False)  # of its tensors

    def __post_init__(self) -> None:
        object.__setattr__(self, "id", ".".join(map(str, self.key)))
        object.__setattr__(self, "nbytes", sum(t.nbytes for t in self.tensors.values()))
        length = len(self.tokens_L)
        _require(self.tokens_L.dtype == torch.int32, f"tokens are {self.tokens_L.dtype}, not int32")
        _require(0 < self.first < length, f"{self.first} prompt tokens of {length}")
        _require(length - 1 <= len(self.taps_LE) <= length, f"{len(self.taps_LE)} hidden states of {length} tokens")
        sampled = length - self.first
        _require(len(self.last_PD) == len(self.lognorms_P) == sampled, f"not one distribution each of {sampled} tokens")
        _require(self.taps_LE.is_floating_point(), f"hidden states are {self.taps_LE.dtype}")
        _require(self.taps_LE.dtype == self.last_PD.dtype, "hidden states of two dtypes")
        _require(self.lognorms_P.dtype == torch.float32, f"log-normalisers are {self.lognorms_P.dtype}")
        _require(all(t.device.type == "cpu" for t in self.tensors.values()), "not on the CPU: copy it there first")

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by name."""
        return {name: getattr(self, name) for name in _TENSORS}

    def owned(self) -> "StoredSequence":
        """The same with tensors that hold no larger memory alive, and that autograd may keep."""
        with torch.inference_mode(False):
            return _with_tensors(self, {name: _own(t) for name, t in self.tensors.items()})


class _Header(NamedTuple):
    """All of a sequence but its tensors, as JSON."""

    key: NoiseKey
    step: int
    policy_version: int
    stream: int
    first: int


def write_sequences(path: Path, sequences: Sequence[StoredSequence]) -> None:
    """One safetensors file that holds all of them."""
    headers = [_Header(s.key, s.step, s.policy_version, s.stream, s.first) for s in sequences]
    tensors = {f"{s.id}/{name}": tensor for s in sequences for name, tensor in s.tensors.items()}
    save_file(tensors, path, metadata={"sequences": json.dumps(headers)})


def map_sequences(path: Path, names: Iterable[str], *, nbytes: int) -> dict[str, StoredSequence]:
    """The named sequences of a file, memory-mapped.  They stay readable when the file is deleted or replaced.

    nbytes: of all sequences that the file should hold.  Raises SequenceFileError when it is missing, truncated, of
    another size, or lacks one of the sequences.
    """
    stored = map_file(path)
    found = sum(sequence.nbytes for sequence in stored)
    if found != nbytes:
        raise SequenceFileError(f"holds {found} bytes of sequences, not {nbytes}")
    by_name = {sequence.id: sequence for sequence in stored}
    missing = [name for name in names if name not in by_name]
    if missing:
        raise SequenceFileError(f"lacks the sequence {missing[0]}")
    return {name: by_name[name] for name in names}


def map_file(path: Path) -> list[StoredSequence]:
    """All sequences of a file, memory-mapped.  Raises SequenceFileError when it is missing or damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            headers = json.loads(file.metadata()["sequences"])
            return [_read(file, _Header(NoiseKey(*key), *numbers)) for key, *numbers in headers]
    except (OSError, SafetensorError) as error:
        raise SequenceFileError(f"cannot be read ({error})") from None
    except (KeyError, TypeError, ValueError) as error:
        raise SequenceFileError(f"is not a file of sequences ({error!r})") from None


def _read(file: safe_open, header: _Header) -> StoredSequence:
    prefix = ".".join(map(str, header.key))
    tensors = {name: file.get_tensor(f"{prefix}/{name}") for name in _TENSORS}
    return StoredSequence(**header._asdict(), **tensors)


def _with_tensors(sequence: StoredSequence, tensors: dict[str, Tensor]) -> StoredSequence:
    return StoredSequence(
        sequence.key, sequence.step, sequence.policy_version, sequence.stream, sequence.first, **tensors
    )


def _own(tensor: Tensor) -> Tensor:
    if tensor.is_inference() or not tensor.is_contiguous() or tensor.untyped_storage().nbytes() != tensor.nbytes:
        return tensor.detach().clone(memory_format=torch.contiguous_format)
    return tensor.detach()


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
