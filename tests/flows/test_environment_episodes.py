"""Episodes with an environment in whole runs: exact, resumable, and cheap to lose."""

import signal
from pathlib import Path

import pytest

from tests.flows.runs import Run

pytestmark = [pytest.mark.slow, pytest.mark.prefect]

TALK = (
    "rollout.environment={path: 'tests.flows.talking:Talk', max_turns: 3, max_turn_tokens: 8}",
    "reward.functions=[{kind: environment}]",
    # Who is decoded together follows the clock, and with it the last bits of log-probabilities in torch's kernels.
    "algorithm.tis_cap=0",
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("episodes")


def test_episodes_are_the_same_whatever_decodes_them_and_after_kills(root: Path) -> None:
    whole = Run(root, "whole", *TALK, steps=3).finish()
    rows = whole.rows[1:]
    assert all(1.5 < row["num_turns/mean"] <= 3 for row in rows)
    assert len({row["critic/rewards/mean"] for row in rows}) == 3
    drafts = "rollout.speculation={policy: fixed, strategies: [{drafter: ngram, depth: 3, tokens: 3}]}"
    other = Run(root, "other", *TALK, drafts, "rollout.dispatch=pull", "cluster.num_workers=1", steps=1).finish()
    assert "rollout/spec_accept_rate" in other.rows[1], "nothing was drafted"
    assert other.rows[1]["rollout/checksum"] == rows[0]["rollout/checksum"]
    killed = Run(root, "killed", *TALK, steps=3)
    assert killed.start_and_kill(lambda: killed.has_scored(2)).wait(60) == -signal.SIGKILL
    assert killed.finish().digest == whole.digest
    assert [row["rollout/checksum"] for row in killed.rows[1:]] == [row["rollout/checksum"] for row in rows]


def test_an_environment_that_raises_hangs_or_dies_costs_episodes_and_not_the_run(root: Path) -> None:
    unlucky = TALK[0].replace("Talk'", "Unlucky', timeout_s: 10, num_processes: 4")
    run = Run(root, "unlucky", unlucky, *TALK[1:], "rollout.num_samples=16", steps=2).finish()
    assert sum(row.get("reward/num_error", 0) for row in run.rows) >= 4
    assert sum(row.get("reward/num_ok", 0) for row in run.rows) >= 4
    for failure in ("no answer today", "a step took longer than", "return (message, reward, done)"):
        assert failure in run.said, failure
    assert "its process ended" in run.said or "the process that held the episode has ended" in run.said
