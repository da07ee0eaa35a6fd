"""Where the Triton kernels run: under the interpreter on CPU tensors, and on a GPU.  The same tests, the same inputs.

tests/conftest.py turns the interpreter on, before anything imports Triton, on a machine without a GPU.
"""

import pytest
import torch

from kernels import dispatch


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """A device on which impl="triton" runs."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if request.param == "cpu" and not dispatch._INTERPRETED:
        pytest.skip("kernels are compiled for the GPU here: TRITON_INTERPRET=1 runs them on the CPU")
    return request.param
