"""Which implementation runs, and what is said where none can."""

import pytest
import torch

from kernels import dispatch


def test_triton_on_a_cpu_without_the_interpreter_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_INTERPRETED", False)
    with pytest.raises(ValueError, match=r"an_op: impl='triton' on a cpu tensor.*TRITON_INTERPRET=1"):
        dispatch.uses_triton("triton", torch.zeros(1), op="an_op")
