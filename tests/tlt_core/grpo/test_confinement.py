"""A reward function sees no password and cannot take the machine's memory."""

import subprocess
import sys

import pytest
import torch

from conf.reward import RewardConfig, RewardFunction
from tlt_core.grpo.confinement import secrets
from tlt_core.grpo.reward import RewardError, Scorer, check_reward_functions
from tlt_core.items.types import Prompt, ScoreStatus

PROMPT = Prompt(0, torch.tensor([1], dtype=torch.int32), "2 + 3 =", "5", "chain_sum", {})
GREEDY = "tests.tlt_core.grpo.greedy_rewards"

SECRET = {
    "HF_TOKEN": "x",
    "WANDB_API_KEY": "x",
    "aws_session_token": "x",
    "AWS_PROFILE": "x",
    "MY_SECRET": "x",
    "PGPASSWORD": "x",
    "MYSQL_PWD": "x",
    "GOOGLE_APPLICATION_CREDENTIALS": "x",
    "SSH_AUTH_SOCK": "x",
    "AZURE_STORAGE_ACCOUNT": "x",
    "S3_ACCESS_KEY_ID": "x",
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


def test_a_check_of_the_functions_sees_no_secret_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "geheim")
    path = "tests.tlt_core.grpo.judge_rewards:judge"
    functions = (RewardFunction(kind="python", path=path),)
    with pytest.raises(
        RewardError, match=r"KeyError: 'JUDGE_API_KEY'.*do not see .*JUDGE_API_KEY.*reward\.pass_variab"
    ):
        check_reward_functions(RewardConfig(functions=functions))
    check_reward_functions(RewardConfig(functions=functions, pass_variables=("JUDGE_API_KEY",)))


def test_a_function_that_ends_its_process_when_it_is_imported_is_refused() -> None:
    functions = (RewardFunction(kind="python", path="tests.tlt_core.grpo.dying_rewards:f"),)
    with pytest.raises(RewardError, match=r"dying_rewards:f' cannot be used \(importing it ends the process .* 3"):
        check_reward_functions(RewardConfig(functions=functions))


def test_a_greedy_response_costs_its_own_score_and_no_memory(caplog: pytest.LogCaptureFixture) -> None:
    with Scorer(config("take", max_memory_gb=1)) as scorer:
        for key, megabytes in (("little", "10"), ("much", "1500"), ("again", "10")):
            scorer.submit(key, PROMPT, megabytes)
        little, much, again = scorer.collect(["little", "much", "again"])
    assert (little.total, again.total) == (1.0, 1.0)
    assert (much.total, much.status) == (0.0, ScoreStatus.ERROR)
    assert "sample much" in caplog.text
    assert "more memory than reward.max_memory_gb=1; raise that (MemoryError)" in caplog.text


def test_a_lower_limit_of_the_system_stays() -> None:
    code = (
        "import resource; from tlt_core.grpo.confinement import confine, limit_gb;"
        "resource.setrlimit(resource.RLIMIT_DATA, (10**9, 10**9)); confine(max_memory_gb=4, pass_variables=());"
        "print(limit_gb())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) == 1.0


def test_a_scoring_process_writes_to_neither_stream() -> None:
    """What a reward function prints, in Python or below it, must not garble the terminal."""
    code = (
        "import os; from tlt_core.grpo import verifiers; verifiers.start([], 64.0, []); "
        "print('one', flush=True); os.write(1, b'two'); os.write(2, b'three')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
