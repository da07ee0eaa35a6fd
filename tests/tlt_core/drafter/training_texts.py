"""A target with something to learn from, and short texts of it, for the tests of the drafter's training."""

import torch

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
