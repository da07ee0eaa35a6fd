"""Equal weights have equal digests, and a worker that loaded others is found."""

import pytest
import torch

from tlt_core.cluster.weight_digest import WeightDigest, outliers
from tlt_core.model.load import random_decoder


def weights(tiny_config, seed):
    return list(random_decoder(tiny_config, seed=seed, dtype=torch.float32).named_parameters())


def value(named):
    digest = WeightDigest()
    passed = list(digest.through(named))
    assert all(a is b for (_, a), (_, b) in zip(passed, named, strict=True))
    return digest.value


def test_equal_weights_have_equal_digests_and_others_have_not(tiny_config):
    named = weights(tiny_config, 0)
    same = value(weights(tiny_config, 0))
    assert value(named) == same
    moved = [(name, tensor + 1e-6) for name, tensor in named]
    halved = [(name, tensor.bfloat16()) for name, tensor in named]
    renamed = [(name + "x", tensor) for name, tensor in named]
    one_tensor = [(n, t * 1.001 if n == "layers.1.o_proj.weight" else t) for n, t in named]
    others = [value(v) for v in (weights(tiny_config, 1), moved, halved, renamed, named[::-1], named[:-1], one_tensor)]
    assert same not in others
    assert len(set(others)) == len(others)
    assert WeightDigest().value == 0


@pytest.mark.parametrize(
    ("published", "expected"),
    [
        ([], ()),
        ([(1, 5)], ()),
        ([(1, 5), (1, 5), (1, 5)], ()),
        ([(1, 5), (1, 6), (1, 5)], (1,)),
        ([(0, 5), (1, 5), (1, 5)], (0,)),
        ([(1, 5), (1, 6)], (1,)),
    ],
)
def test_outliers(published, expected):
    assert outliers(published) == expected
