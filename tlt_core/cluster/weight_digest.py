"""Fingerprints of published weights: did every worker load the same?"""

import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

_SAMPLES = 64  # bytes would be read for seconds; this many values of each tensor take milliseconds


class WeightDigest:
    """Fingerprint of weights on their way into an engine, from a strided sample of each tensor.

    digest = WeightDigest()
    engine.load_weights(digest.through(trainer.weights()))
    digest.value  # equal on all workers that loaded the same weights
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        self._samples: list[Tensor] = []

    def through(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The same names and tensors."""
        for name, tensor in weights:
            flat = tensor.detach().reshape(-1)
            self._names.append(f"{name} {tuple(tensor.shape)} {tensor.dtype}")
            self._samples.append(flat[:: max(1, len(flat) // _SAMPLES)].clone().view(torch.uint8))
            yield name, tensor

    @property
    def value(self) -> int:
        """A 32-bit checksum of everything that went through; it depends on the order of the tensors."""
        checksum = zlib.crc32("\n".join(self._names).encode())
        if not self._samples:
            return checksum
        return zlib.crc32(torch.cat(self._samples).cpu().numpy().tobytes(), checksum)


def outliers(published: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Workers whose (version, digest) differs from the most common one; in a tie, the first one counts as right."""
    if not published:
        return ()
    common = Counter(published).most_common(1)[0][0]
    return tuple(worker for worker, own in enumerate(published) if own != common)
