"""Sequences of known bytes."""

import hashlib

import torch

from tlt_core.items.train_sequence import TrainSequence
from tlt_core.items.types import NoiseKey

TAPS, HIDDEN = 12, 4


def make(step=0, prompt=0, sample=0, *, length=10, first=4, dtype=torch.bfloat16) -> TrainSequence:
    """Its contents are a function of its key alone."""
    key = NoiseKey(5, step, prompt, sample)
    generator = torch.Generator().manual_seed(hash(key) % 2**31)
    return TrainSequence(
        key=key,
        policy_version=step + 100,
        stream=2**62 + prompt,
        first=first,
        tokens_L=torch.randint(0, 999, (length,), generator=generator, dtype=torch.int32),
        taps_LE=torch.randn(length - 1, TAPS, generator=generator).to(dtype),
        last_PD=torch.randn(length - first, HIDDEN, generator=generator).to(dtype),
        lognorms_P=torch.randn(length - first, generator=generator),
    )


def bytes_of(length: int, *, first: int = 4, itemsize: int = 2) -> int:
    """Of a sequence from `make`, counted by hand."""
    tokens, taps = 4 * length, itemsize * TAPS * (length - 1)
    return tokens + taps + (itemsize * HIDDEN + 4) * (length - first)


def digest(sequence: TrainSequence) -> str:
    """Of every bit of it."""
    sha = hashlib.sha256(repr([sequence.key, sequence.step, sequence.policy_version, sequence.stream]).encode())
    sha.update(repr([sequence.first, [t.dtype for t in sequence.tensors.values()]]).encode())
    for tensor in sequence.tensors.values():
        sha.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()
