"""Files of `TrainSequence`s: safetensors, read as memory maps.

write_sequences(path, sequences);  map_sequences(path, ids) -> the same, in the page cache instead of memory
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from tlt_core.items.train_sequence import TENSORS, TrainSequence
from tlt_core.items.types import NoiseKey


class SequenceFileError(ValueError):
    """A file of sequences that cannot be used.  The text says why."""


def write_sequences(path: Path, sequences: Sequence[TrainSequence]) -> None:
    """One safetensors file that holds all of them."""
    headers = [[s.key, s.policy_version, s.stream, s.first] for s in sequences]
    tensors = {f"{s.id}/{name}": tensor for s in sequences for name, tensor in s.tensors.items()}
    save_file(tensors, path, metadata={"sequences": json.dumps(headers)})


def map_sequences(path: Path, ids: Iterable[str], *, nbytes: int) -> list[TrainSequence]:
    """The named sequences of a file, memory-mapped.  They stay readable when the file is deleted or replaced.

    nbytes: of all sequences that the file should hold.  Raises SequenceFileError when it is missing, truncated, of
    another size, or lacks one of the sequences.
    """
    by_id = {sequence.id: sequence for sequence in map_file(path)}
    found = sum(sequence.nbytes for sequence in by_id.values())
    if found != nbytes:
        raise SequenceFileError(f"holds {found} bytes of sequences, not {nbytes}")
    if missing := [wanted for wanted in ids if wanted not in by_id]:
        raise SequenceFileError(f"lacks the sequence {missing[0]}")
    return [by_id[wanted] for wanted in ids]


def map_file(path: Path) -> list[TrainSequence]:
    """All sequences of a file, memory-mapped.  Raises SequenceFileError when it is missing or damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            return [_read(file, *header) for header in json.loads(file.metadata()["sequences"])]
    except (OSError, SafetensorError) as error:
        raise SequenceFileError(f"cannot be read ({error})") from None
    except (KeyError, TypeError, ValueError) as error:
        raise SequenceFileError(f"is not a file of sequences ({error!r})") from None


def _read(file: safe_open, key: Sequence[int], policy_version: int, stream: int, first: int) -> TrainSequence:
    prefix = ".".join(map(str, key))
    tensors = {name: file.get_tensor(f"{prefix}/{name}") for name in TENSORS}
    return TrainSequence(key=NoiseKey(*key), policy_version=policy_version, stream=stream, first=first, **tensors)
