"""A reward function sees no password and cannot take the machine's memory."""

import pytest
import torch

from conf.reward import RewardConfig, RewardFunction
from tlt_core.grpo.confinement import secrets
from tlt_core.grpo.reward import Scorer
from tlt_core.items.types import Prompt, ScoreStatus

PROMPT = Prompt(0, torch.tensor([1], dtype=torch.int32), "2 + 3 =", "5", "chain_sum", {})
GREEDY = "tests.tlt_core.grpo.greedy_rewards"

SECRET = {
    "HF_TOKEN": "x",
    "aws_session_token": "x",
    "PGPASSWORD": "x",
    "GOOGLE_APPLICATION_CREDENTIALS": "x",
    "AZURE_STORAGE_ACCOUNT": "x",
    "MLFLOW_TRACKING_USERNAME": "x",
    "TLT_NOTIFY_URL": "https://chat.example/hook",
    "DATABASE_URL": "postgresql://me:geheim@host/db",
}
PLAIN = {"PATH": "/bin", "PWD": "/x", "TOKENIZERS_PARALLELISM": "false", "GIT_AUTHOR_NAME": "a", "TLT_HOME": "/x"}


def config(name: str, **settings: object) -> RewardConfig:
    return RewardConfig(functions=(RewardFunction(kind="python", path=f"{GREEDY}:{name}"),), timeout_s=60, **settings)


def test_what_looks_like_a_secret() -> None:
    assert secrets(SECRET | PLAIN) == sorted(SECRET)
    assert "HF_TOKEN" not in secrets(SECRET, but=["HF_TOKEN"])


def test_secrets_are_gone_before_user_code_is_imported_unless_they_are_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (SECRET | PLAIN).items():
        monkeypatch.setenv(name, value)
    names = ",".join([*SECRET, *PLAIN])
    for passed in ((), ("HF_TOKEN", "DATABASE_URL")):
        with Scorer(config("seen_at_import", pass_variables=passed)) as scorer:
            scorer.submit(0, PROMPT, names)
            assert scorer.collect([0])[0].components == (len(PLAIN) + len(passed),)


def test_a_greedy_response_costs_its_own_score_and_no_memory(caplog: pytest.LogCaptureFixture) -> None:
    with Scorer(config("take", max_memory_gb=1)) as scorer:
        for key, megabytes in (("little", "10"), ("much", "1500"), ("again", "10")):
            scorer.submit(key, PROMPT, megabytes)
        little, much, again = scorer.collect(["little", "much", "again"])
    assert (little.total, again.total) == (1.0, 1.0)
    assert (much.total, much.status) == (0.0, ScoreStatus.ERROR)
    assert "sample much" in caplog.text
    assert "more memory than reward.max_memory_gb=1; raise that (MemoryError)" in caplog.text
