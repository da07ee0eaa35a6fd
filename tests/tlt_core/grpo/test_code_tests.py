"""Code in a response is right when it passes its tests, and harms nothing when it does not."""

import subprocess

import pytest

from conf.reward import RewardConfig, RewardFunction
from tests.tlt_core.grpo.test_reward import PROMPT
from tlt_core.grpo import code_tests
from tlt_core.grpo.code_tests import NoCode, Unusable, passes
from tlt_core.grpo.reward import RewardError, Scorer, check_reward_functions
from tlt_core.items.types import Prompt, ScoreStatus

ADD = "def add(a, b):\n    return a + b\n"
ASSERTS = "assert add(1, 2) == 3\nassert add(-1, 1) == 0"
PROGRAM = '{"inputs": ["2\\n", "5\\n"], "outputs": ["4\\n", "10"]}'
MANY_LINES = '{"inputs": [["1", "2"]], "outputs": [["1", "2"]]}'
CHECK = "def check(candidate):\n    assert candidate(1, 2) == 3\n"
ORPHAN = "import time; time.sleep(97.25)"


@pytest.fixture(autouse=True)
def _apart() -> None:
    try:
        code_tests.require_apart()
    except Unusable as error:
        pytest.skip(str(error))


def said(code: str) -> str:
    return f"First I think.\n```python\nwrong = 1\n```\nNo:\n```python\n{code}```\nThat is all."


@pytest.mark.parametrize(
    ("code", "tests", "expected"),
    [
        (ADD, ASSERTS, True),
        (ADD, '["assert add(1, 2) == 3", "assert add(0, 0) == 0"]', True),
        (ADD + "print('noise', end='')\n", ASSERTS, True),
        (ADD.replace("+ b", "- b"), ASSERTS, False),
        (ADD + "def broken(:\n", ASSERTS, False),
        ("print(int(input()) * 2)\n", PROGRAM, True),
        ("print(int(input()) ** 2)\n", PROGRAM, False),  # right for the first input alone
        ("print(input())\nprint(input())\n", MANY_LINES, True),
        (ADD + "if __name__ == '__main__':\n    print(input())\n", ASSERTS, True),
        ("import os\nos.write(1, bytes([255]))\n" + ADD, ASSERTS, True),
        ("    def add(a, b):\n        return a + b\n", ASSERTS, True),
        (ADD, CHECK, True),
        (ADD.replace("+ b", "- b"), CHECK, False),
    ],
)
def test_code_is_right_when_all_tests_pass(code: str, tests: str, expected: bool) -> None:
    assert passes(said(code), tests, timeout_s=20.0, entry_point="add") == expected


@pytest.mark.parametrize(
    "code",
    [
        "import sys\nsys.exit(0)\n",
        "import os\nos._exit(0)\n",
        "while True:\n    pass\n",
        f"held = bytearray({3 * int(code_tests.MOST_MEMORY_GB * 1e9)})\n" + ADD,
        "import socket\nsocket.create_connection(('127.0.0.1', PORT), 1)\n" + ADD,
        "open('x', 'w').write('x' * (1 << 25))\n" + ADD,
        "import os\nassert 'TLT_TOKEN' in os.environ\n" + ADD,
    ],
    ids=["exit", "exit at once", "loop", "memory", "network", "disk", "variables"],
)
def test_what_code_must_not_do_fails(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    monkeypatch.setenv("TLT_TOKEN", "x")
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = code.replace("PORT", str(server.getsockname()[1]))
        assert not passes(said(code), ASSERTS, timeout_s=3.0)


def test_processes_that_code_starts_end_with_it() -> None:
    start = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {ORPHAN!r}], start_new_session=True)\n"
    assert passes(said(start + ADD), ASSERTS, timeout_s=20.0)
    assert subprocess.run(["pgrep", "-f", "time.sleep.97.25"], check=False, capture_output=True).stdout == b""


def test_no_code_and_no_tests_are_told_apart() -> None:
    with pytest.raises(NoCode):
        passes("def add(a, b): ...", ASSERTS, timeout_s=5.0)
    with pytest.raises(Unusable, match="give the row an `entry_point`"):
        passes(said(ADD), CHECK, timeout_s=5.0)
    with pytest.raises(Unusable, match="of a program"):
        passes(said(ADD), '{"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}', timeout_s=5.0)
    with pytest.raises(Unusable, match="give statements, a list of them"):
        passes(said(ADD), '{"inputs": ["1"], "outputs": []}', timeout_s=5.0)


def test_as_a_reward_term_it_costs_a_slow_response_its_score_alone() -> None:
    cfg = RewardConfig(functions=(RewardFunction(kind="code_tests"),), timeout_s=4.0)
    prompt = Prompt(0, PROMPT.tokens, "Write add.", ASSERTS, "mbpp", {})
    responses = [said(ADD), said("while True:\n    pass\n"), "I cannot."]
    with Scorer(cfg) as scorer:
        for key, response in enumerate(responses):
            scorer.submit(key, prompt, response)
        scores = scorer.collect(range(3))
    assert [score.total for score in scores] == [1.0, 0.0, 0.0]
    assert [score.status for score in scores] == [ScoreStatus.OK, ScoreStatus.OK, ScoreStatus.UNPARSEABLE]


def test_a_machine_that_cannot_keep_code_apart_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(RewardError, match=r"'code_tests' cannot be used \(.*install util-linux"):
        check_reward_functions(RewardConfig(functions=(RewardFunction(kind="code_tests"),)))
