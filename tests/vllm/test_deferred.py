"""The drafter's passes that are put off while nothing is drafted: what it proposes afterwards is what it proposes when
vLLM runs it in every step."""

import json
import subprocess
from pathlib import Path

import pytest

from tlt_core.rollout.vllm import environment as vllm_environment

pytestmark = pytest.mark.vllm

# Five requests on four places: they end at different times, and the last begins while the others' passes are put off.
MAX_TOKENS = [60, 24, 40, 60, 30]
LENGTHS = [3, 3, 0, 0, 0, 0, 0, 3, 0, 0, 3, 3, *[0] * 12, 3, 3, 0, 3]


def proposed(python: Path, target, drafter: Path, *, defer: bool, most_tokens: int = 0) -> dict:
    job = {
        "model": str(target.folder),
        "drafter": str(drafter),
        "prompts": [list(p) for p in target.prompts[: len(MAX_TOKENS)]],
        "max_tokens": MAX_TOKENS,
        "lengths": LENGTHS,
        "defer": defer,
        "most_tokens": most_tokens,
    }
    done = subprocess.run(
        [str(python), str(Path(__file__).with_name("scripted_drafts.py"))],
        input=json.dumps(job),
        env=vllm_environment.environment(python, threads=1),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def in_every_step(vllm_python, target, drafter) -> dict:
    return proposed(vllm_python, target, drafter, defer=False)


@pytest.mark.parametrize("most_tokens", [0, 9])
def test_drafts_are_those_of_a_drafter_that_runs_in_every_step(
    vllm_python, target, drafter, in_every_step, most_tokens
):
    found = proposed(vllm_python, target, drafter, defer=True, most_tokens=most_tokens)
    assert found["tokens"] == in_every_step["tokens"]
    assert [list(step.values()) for step in found["drafts"]] == [list(s.values()) for s in in_every_step["drafts"]]
    assert sum(len(chain) for step in found["drafts"] for chain in step.values()) > 60
    assert in_every_step["passes"] == 0
    assert found["passes"] >= (8 if most_tokens else 4)
