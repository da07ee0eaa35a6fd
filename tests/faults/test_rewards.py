"""Reward functions that misbehave in every way: the run goes on, and each such response scores 0 and is counted."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.faults import table
from tests.faults.harness import Run, settings
from tests.faults.rewards import MISDEEDS, misdeed_of

pytestmark = [pytest.mark.faults, pytest.mark.prefect]
STEPS, PROMPTS, SAMPLES = 2, 4, 8
# The pool takes exit code 0 for no failure of its process, and waits for the answer.
_IN_TIME_ONLY = {"hangs", "hangs and ignores SIGTERM", "ends its process with exit code 0"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    root = tmp_path_factory.mktemp("rewards")
    more = [
        *settings(),
        f"num_steps={STEPS}",
        f"rollout.num_prompts={PROMPTS}",
        f"rollout.num_samples={SAMPLES}",
        f"tracking.num_sample_rollouts={PROMPTS * SAMPLES}",
        "coldstart.enabled=false",
        "evaluation.every_steps=0",
        "reward.timeout_s=1",
        "reward.max_memory_gb=1",
        'reward.functions=[{kind: python, path: "tests.faults.rewards:misbehaving"}]',
    ]
    started = Run(
        root / "runs", "run", home=root / "home", prefect=root / "prefect", uri=f"sqlite:///{root}/db", more=more
    )
    started.start()
    yield started
    started.kill()


@pytest.fixture(scope="module")
def responses(run: Run) -> list[dict[str, Any]]:
    assert run.process is not None
    assert run.process.wait(900) == 0, run.said()[-3000:]
    files = sorted((run.dir / "samples").glob("step_*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("name", MISDEEDS)
def test_a_response_that_cannot_be_scored_scores_0(
    responses: list[dict[str, Any]], book: list[dict[str, Any]], run: Run, name: str
) -> None:
    with table.noted(book, f"reward function {name}", "rollout, reward") as row:
        assert len(responses) == STEPS * PROMPTS * SAMPLES
        own = [r for r in responses if misdeed_of(r["response"]) == name]
        assert own, "no response met it; choose other sizes"
        assert {(r["reward"], r["status"]) for r in own} == {(0.0, "TIMEOUT" if name in _IN_TIME_ONLY else "ERROR")}
        row |= {"code": None, "message": f"{len(own)} responses score 0; the others keep their scores"}


def test_all_others_keep_their_scores_and_the_log_says_what_failed(responses: list[dict[str, Any]], run: Run) -> None:
    good = [r for r in responses if not misdeed_of(r["response"])]
    assert good
    assert {(r["reward"], r["status"]) for r in good} == {(1.0, "OK")}
    for words in ("out of order", "reward.timeout_s=1", "exit code", "reward.max_memory_gb", "the sample scores 0"):
        assert words in run.said()
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
