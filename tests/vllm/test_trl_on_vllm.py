"""The example of docs/vllm.md: TRL's trainer, unchanged, in its own environment; rollouts on a vLLM server."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from bench.engines import environment
from bench.peers.trl import TRL
from tests.vllm.vllm_server import VllmServer
from tlt_core.run.inputs import artifacts_dir

pytestmark = pytest.mark.vllm

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "trl_on_vllm.py"


def test_trl_trains_on_rollouts_of_a_server_with_the_plug_in(vllm_python, target, drafter, tmp_path):
    """Two steps with a gradient, and drafts that were accepted.  Their length is fixed, so that there are many: the
    tuner may find that this drafter does not pay, and stop after a few."""
    python = environment.interpreter(TRL, artifacts_dir() / "peers")
    server = VllmServer(
        vllm_python,
        target.folder,
        log=tmp_path / "vllm.log",
        speculative={"method": "eagle3", "model": str(drafter), "num_speculative_tokens": 3},
        options=(
            "--enforce-eager",
            "--additional-config",
            json.dumps({"tlt": {"draft_lengths": [1, 3], "policy": "fixed"}}),
        ),
        variables={"VLLM_SERVER_DEV_MODE": "1"},
        name=str(target.folder),
    )
    with server:
        before = server.spec_counters()
        done = subprocess.run(
            [str(python), str(EXAMPLE), f"http://127.0.0.1:{server.port}", str(target.folder)],
            env=environment.variables(threads=1),
            capture_output=True,
            text=True,
            check=False,
            timeout=900,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        drafted = server.spec_counters() - before
    losses = re.findall(r"'grad_norm': '?([\d.e-]+)", done.stdout)
    print(done.stdout[-1500:])
    assert len(losses) == 2, done.stdout[-2000:]
    assert all(float(norm) > 0 for norm in losses)
    assert drafted.draft_tokens > 0
    assert drafted.accepted > 0
