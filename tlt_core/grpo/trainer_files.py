"""A trainer's state in a checkpoint: each worker writes a share of the tensors, whole.

So no device and no worker ever holds all of it, and any number of workers can read what another number wrote.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

_FILE = "trainer_{}.safetensors"  # by rank


def write(folder: Path, rank: int, tensors: dict[str, Tensor]) -> None:
    """This worker's share.  An empty one is a file, too."""
    save_file(tensors, folder / _FILE.format(rank))


class SavedState(Mapping[str, Tensor]):
    """What all workers wrote.  A tensor is read when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, Any] = {}  # by tensor
        for path in sorted(folder.glob(_FILE.format("*"))):
            file = safe_open(path, framework="pt")
            self._files |= dict.fromkeys(file.keys(), file)

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)
