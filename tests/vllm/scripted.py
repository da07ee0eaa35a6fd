"""Starts `scripted_engine`, which says what may be asked of it."""

import json
import subprocess
from pathlib import Path
from typing import Any

from tests.vllm.conftest import Small
from tlt_core.rollout.vllm import environment as vllm_environment

# Every length after every other one.
LENGTHS = [3, 3, 0, 0, 2, 1, 3, 0, 3, 0, 0, 0, 3, 2, 1] * 3
STOPS = [2, 407]  # some responses end by themselves


def told(python: Path, small: Small, **options: Any) -> dict[str, Any]:
    """Its last line.  options: what differs from a greedy pass without drafts, V1 runner, synchronous scheduler."""
    job = {
        "model": str(small.policy),
        "drafter": None,
        "second_runner": False,
        "asynchronous": False,
        "exact": True,
        "prompts": small.prompts,
        "max_tokens": [24 + 4 * i for i in range(len(small.prompts))],
        "temperatures": [0.0] * len(small.prompts),
        "repetition": [1.0] * len(small.prompts),
        "stop": STOPS,
        "lengths": None,
        "load_format": "auto",
        "extension": None,
        "loads": [None],
    }
    done = subprocess.run(
        [str(python), str(Path(__file__).with_name("scripted_engine.py"))],
        input=json.dumps(job | options),
        env=vllm_environment.environment(python, threads=1),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result
