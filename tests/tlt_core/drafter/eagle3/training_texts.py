"""A target with something to learn from, and short texts of it, for the tests of the drafter's training."""

import torch

from tlt_core.drafter.eagle3.observe import draft_probs
from tlt_core.items.train_sequence import TrainSequence
from tlt_core.items.types import NoiseKey
from tlt_core.model.load import random_decoder

IDS = torch.tensor([0, 2, 3, 5, 7, 8, 11, 13, 20, 21, 30, 41, 42, 50, 61, 63])
LENGTHS = (9, 3, 14, 6)


def lively_decoder(config, *, dtype=torch.float32):
    decoder = random_decoder(config, seed=0, dtype=dtype)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if not name.endswith("norm.weight"):
                parameter *= 10
        decoder.norm.weight *= 4
    return decoder


def texts(lengths=LENGTHS, *, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 64, (length,), generator=generator) for length in lengths]


def blank(length, first):
    """A sequence of zeros."""
    return TrainSequence(
        key=NoiseKey(0, 0, 0, 0),
        policy_version=0,
        stream=0,
        first=first,
        tokens_L=torch.arange(length, dtype=torch.int32),
        taps_LE=torch.zeros(length - 1, 6),
        last_PD=torch.zeros(length - first, 4),
        lognorms_P=torch.zeros(length - first),
    )


def probs_of(sequence, decoder, ids):
    """The target's distributions on a draft vocabulary, [P, J]."""
    return draft_probs(sequence, slice(None), decoder.head_weight.detach()[ids])
