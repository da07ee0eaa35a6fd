"""A row for each op with its rates, beside the ceilings of the device."""

import torch

from bench.kernels import ops
from bench.kernels.ops import Ceilings, Clock, Shapes, Work

TINY = Shapes(64, 16, 2, 2, 16, 2, 32, 8, ((1, 1, 16), (2, 3, 24)), 1, 32)


def test_every_op_is_measured() -> None:
    ceilings, *rows = ops.run(torch.device("cpu"), TINY, repeats=2)
    assert ceilings["bytes_per_s"]["min"] > 0
    assert {row["configuration"] for row in rows} == {work.name for work in ops.works(torch.device("cpu"), TINY)}
    assert len(rows) == 11  # two shapes of three of them
    assert all(row["seconds"]["min"] > 0 for row in rows)


def test_a_rate_is_the_work_over_the_median_of_the_calls_after_a_first_one() -> None:
    """100 bytes and 30 operations, where 400 and 120 a second are possible."""

    class Told(Clock):
        durations = iter([3.0, 0.1, 0.5, 0.2, 8.0, 9.0, 0.4])

        def _on_cpu(self, call: object) -> float:
            return next(self.durations)

    calls: list[str] = []
    work = Work("x", "", 100, 30, calls.append, ("triton",))
    figures = ops.measure(Told(torch.device("cpu")), torch.device("cpu"), work, Ceilings(400.0, 120.0))
    assert figures == {
        "auto": {"seconds": 0.5, "bytes_per_s": 200, "flop_per_s": 60, "of_copy": 0.5, "of_product": 0.5}
    }
    assert calls == ["auto"]
