"""Which implementation runs, and what is said where none can."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels import dispatch

ROOT = Path(__file__).parents[2]


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )


def test_auto_is_no_triton_on_the_cpu_and_claims_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Whether torch or C runs there is decided op by op; the run's first lines tell which kernels there are."""
    dispatch._auto.cache_clear()
    with caplog.at_level(logging.INFO, logger="kernels.dispatch"):
        assert not dispatch.uses_triton("auto", torch.zeros(1), op="an_op")
    assert not caplog.records


def test_triton_on_a_cpu_without_the_interpreter_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_INTERPRETED", False)
    with pytest.raises(ValueError, match=r"an_op: impl='triton' on a cpu tensor.*TRITON_INTERPRET=1"):
        dispatch.uses_triton("triton", torch.zeros(1), op="an_op")


def test_ops_import_and_run_without_triton() -> None:
    """As on a system that Triton has no package for."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from kernels import dispatch\n"
        "from kernels.sampling.coupled_sample import coupled_sample\n"
        "assert dispatch.triton is None\n"
        "keys = torch.zeros(1, 2, dtype=torch.int32)\n"
        "print(coupled_sample(torch.tensor([[0.0, 99.0]]), keys).tokens_N.tolist())\n"
        "coupled_sample(torch.zeros(1, 2), keys, impl='triton')\n"
    )
    done = python(code)
    assert done.stdout == "[1]\n", done.stderr
    assert "Triton is not installed" in done.stderr
