"""Each Triton kernel against torch on the operands of `bench.kernels.ops`: on a GPU Qwen2.5-7B's sizes in bfloat16.

Both round to bfloat16 at other places, so floats agree to 2 % in norm (a wrong mask or stride costs more), and of 64
sampled tokens one may differ.
"""

from itertools import islice

import pytest
import torch
from torch import Tensor

from bench.kernels.ops import QWEN_7B, Shapes, works

SMALL = Shapes(512, 32, 2, 2, 16, 2, 64, 8, ((1, 1, 48), (2, 3, 64), (3, 1, 32)), 1, 32)
WORKS = {
    "sampling, 1 row": 0,
    "sampling, 64 rows": 1,
    "token_logprob, gradients": 2,
    "tree_attention, one long": 6,
    "tree_attention, drafts": 7,
    "tree_attention, 64 rows": 8,
    "spec_verify": 10,
    "kv_commit": 11,
    "distill_loss, gradient": 12,
}


@pytest.mark.parametrize("index", WORKS.values(), ids=list(WORKS))
def test_triton_is_torch(device: str, index: int) -> None:
    work = next(islice(works(torch.device(device), QWEN_7B if device == "cuda" else SMALL), index, None))
    assert "triton" in work.impls
    found = [x.clone() for x in _tensors(work.call("triton"))]  # first, so that no memory holds torch's result already
    for ours, theirs in zip(found, _tensors(work.call("torch")), strict=True):
        if ours.is_floating_point():
            assert (ours.double() - theirs.double()).norm() < 0.02 * theirs.double().norm()
            assert ours.isfinite().all()
        else:
            assert (ours != theirs).sum() <= ours.numel() // 64


def _tensors(result: object) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else [x for x in result if isinstance(x, Tensor)]  # type: ignore[attr-defined]
