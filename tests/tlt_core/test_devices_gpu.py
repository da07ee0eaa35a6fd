"""The stations of `test_devices` on a real GPU, whose kernels round in another order and may use TF32 (10 bits).

The bounds are believed, not measured: nobody has run these tests on a GPU yet.
"""

import pytest
import torch

from kernels.attention.packed_attention import packed_causal_attention
from tests.tlt_core import test_devices as stations
from tests.tlt_core.test_devices import decoder, folder, sequences  # noqa: F401  (fixtures, which arguments below name again: F811)

pytestmark = pytest.mark.gpu
GPU, CPU = torch.device("cuda:0"), torch.device("cpu")


def test_idle_time_training(folder, sequences, tmp_path) -> None:  # noqa: F811
    expected = stations.published(CPU, folder, tmp_path / "cpu", sequences)
    for ours, theirs in zip(stations.published(GPU, folder, tmp_path / "gpu", sequences), expected, strict=True):
        assert ours.device == GPU
        torch.testing.assert_close(ours.cpu(), theirs, rtol=0.02, atol=2e-3)


def test_policy_update(folder, tmp_path) -> None:  # noqa: F811
    expected, weights = stations.updated(CPU, folder, tmp_path / "cpu")
    found, theirs = stations.updated(GPU, folder, tmp_path / "gpu")
    assert found == pytest.approx(expected, rel=0.02, abs=1e-4)
    for a, b in zip(weights, theirs, strict=True):
        torch.testing.assert_close(b.cpu(), a, rtol=0.02, atol=2e-3)


def test_first_drafter(folder, tmp_path) -> None:  # noqa: F811
    assert stations.made(GPU, folder, tmp_path) == pytest.approx(stations.made(CPU, folder, tmp_path), rel=0.02)


@pytest.mark.parametrize("impl", ["varlen", "auto"])
def test_attention_of_the_update(impl: str) -> None:
    q, k, v = torch.randn(300, 14, 64), torch.randn(500, 2, 64), torch.randn(500, 2, 64)
    offsets, key_offsets = torch.tensor([0, 100, 300]), torch.tensor([0, 180, 500])
    results = []
    for device, dtype, how in ((CPU, torch.float32, "sdpa"), (GPU, torch.bfloat16, impl)):
        inputs = [x.to(device, dtype).requires_grad_() for x in (q, k, v)]
        out = packed_causal_attention(*inputs, offsets, key_offsets_S1=key_offsets, impl=how)
        out.float().square().sum().backward()
        results.append([out, *(x.grad for x in inputs)])
    for ours, theirs in zip(*results, strict=True):
        error = (ours - theirs.float().cpu()).norm() / ours.norm()
        assert error < 0.02
