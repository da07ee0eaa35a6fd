"""A row for each op with its rates, and the ceilings; on a GPU Triton's beside torch's."""

import pytest
import torch

from bench.kernels import ops as bench_kernels
from bench.kernels.ops import Ceilings, Clock, Shapes, Work

TINY = Shapes(64, 16, 2, 2, 16, 2, 32, 8, ((1, 1, 16), (2, 3, 24)), 1, 32)
OPS = {
    "coupled_sample", "token_logprob", "slot_attention", "packed_attention", "spec_verify", "kv_commit", "distill_loss",
    "tree_attention",
}  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_rows(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    ceilings, *rows = bench_kernels.run(torch.device(device), TINY, repeats=2)
    assert ceilings["bytes_per_s"]["min"] > 0
    assert {row["configuration"] for row in rows} == OPS
    for row in rows:
        assert 0 < row["seconds"]["min"] <= row["seconds"]["median"] <= row["seconds"]["max"]
        assert row["bytes_per_s"]["max"] > 0
    impls = {row["impl"] for row in rows if row["configuration"] == "kv_commit"}
    assert impls == ({"auto"} if device == "cpu" else {"triton", "torch"})


def test_rates_by_hand() -> None:
    """100 bytes and 30 operations in half a second, where 400 and 120 a second are possible."""
    work = Work("x", "", 100, 30, lambda impl: None, ("triton",))
    figures = bench_kernels._figures(0.5, work, Ceilings(400.0, 120.0))
    assert figures == {"seconds": 0.5, "bytes_per_s": 200, "flop_per_s": 60, "of_copy": 0.5, "of_product": 0.5}


def test_median_of_the_calls_after_a_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, calls, durations = Clock(torch.device("cpu")), [], iter([3.0, 1.0, 8.0])
    monkeypatch.setattr(clock, "_on_cpu", lambda call: (call(), next(durations))[1])
    assert clock.seconds(lambda: calls.append(1), calls=3) == 3.0
    assert len(calls) == 4
