"""Weights on their way into vLLM's process: pieces of bounded size, each in a file in shared memory."""

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

MOST_BYTES = 256 << 20
_SHARED = Path("/dev/shm")


def pieces(tensors: Iterable[tuple[str, Tensor]], *, most_bytes: int = MOST_BYTES) -> Iterator[dict[str, Tensor]]:
    """Tensors by name, together at most `most_bytes`; a larger tensor is a piece by itself."""
    piece: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if piece and size + tensor.nbytes > most_bytes:
            yield piece
            piece, size = {}, 0
        piece[name] = tensor
        size += tensor.nbytes
    if piece:
        yield piece


@contextmanager
def in_shared_memory(piece: dict[str, Tensor], *, otherwise: Path) -> Iterator[Path]:
    """A safetensors file of the piece, for the block.  otherwise: folder for it where there is no shared memory."""
    needed = 2 * sum(tensor.nbytes for tensor in piece.values())
    roomy = _SHARED.is_dir() and shutil.disk_usage(_SHARED).free > needed
    file = (_SHARED if roomy else otherwise) / f"tlt-weights-{os.getpid()}.safetensors"
    try:
        save_file(piece, file)
        yield file
    finally:
        file.unlink(missing_ok=True)
