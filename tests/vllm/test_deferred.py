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


# The model, n-grams and neither take turns.
MIXED = [3, -3, -3, 0, -2, 3, 3, -3, 0, 0, -3, 3, *[-3] * 6, 3, -1, 3, 0, -3, *[3, -3] * 20]
HEATS = {"greedy": [0.0] * 5, "0.7": [0.7] * 5, "1": [1.0] * 5, "mixed": [0.0, 1.0, 0.7, 1.0, 0.0]}


def proposed(
    python: Path,
    target,
    drafter: Path,
    *,
    defer: bool = True,
    most_tokens: int = 0,
    lengths: list[int] = LENGTHS,
    temperatures: list[float] = HEATS["greedy"],
    prompts: list[list[int]] | None = None,
) -> dict:
    job = {
        "model": str(target.folder),
        "drafter": str(drafter),
        "prompts": prompts or [list(p) for p in target.prompts[: len(MAX_TOKENS)]],
        "max_tokens": MAX_TOKENS,
        "temperatures": temperatures,
        "lengths": lengths,
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


@pytest.fixture(scope="module")
def siblings(target) -> list[list[int]]:
    """Prompts of which three are one: their responses have text in common, at temperatures above 0, too."""
    return [list(target.repeating)] * 3 + [list(p) for p in target.prompts[:2]]


@pytest.mark.parametrize("heat", HEATS)
def test_n_grams_and_the_model_take_turns(vllm_python, target, drafter, siblings, heat):
    """Tokens are those without drafts, and the model drafts as if it had run in every step."""
    same = {"temperatures": HEATS[heat], "prompts": siblings}
    plain = proposed(vllm_python, target, drafter, lengths=[0], **same)
    whole = proposed(vllm_python, target, drafter, lengths=MIXED, defer=False, **same)
    found = proposed(vllm_python, target, drafter, lengths=MIXED, **same)
    assert found["tokens"] == whole["tokens"] == plain["tokens"]
    assert [list(step.values()) for step in found["drafts"]] == [list(s.values()) for s in whole["drafts"]]
    by_kind = {
        kind: [s for s, length in zip(found["drafts"], MIXED, strict=False) if length * kind > 0] for kind in (-1, 1)
    }
    drafted = {kind: sum(len(chain) for step in steps for chain in step.values()) for kind, steps in by_kind.items()}
    assert min(drafted.values()) > 40
    most = 0.9 if heat == "greedy" else 1.0
    assert len(found["drafts"]) < most * len(plain["drafts"]), "drafts are accepted"
    assert found["passes"] >= 6 > whole["passes"]
