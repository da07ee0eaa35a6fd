"""A row for each op with its rates, beside the ceilings of the device."""

import torch

from bench.kernels import ops
from bench.kernels.ops import Shapes

TINY = Shapes(64, 16, 2, 2, 16, 2, 32, 8, ((1, 1, 16), (2, 3, 24)), 1, 32)


def test_every_op_is_measured() -> None:
    ceilings, *rows = ops.run(torch.device("cpu"), TINY, repeats=2)
    assert ceilings["bytes_per_s"]["min"] > 0
    assert {row["configuration"] for row in rows} == {work.name for work in ops.works(torch.device("cpu"), TINY)}
    assert len(rows) == 11  # two shapes of three of them
    assert all(row["seconds"]["min"] > 0 for row in rows)
