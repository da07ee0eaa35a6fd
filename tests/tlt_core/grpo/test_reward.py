"""Right answers earn 1, everything else 0, and no reward function can end a run."""

import time

import psutil
import pytest
import torch

from conf.reward import RewardConfig, RewardFunction
from tlt_core.grpo.reward import RewardError, Scorer, check_reward_functions
from tlt_core.grpo.reward_styles import Item
from tlt_core.grpo.verifiers import (
    ERROR,
    UNPARSEABLE,
    format_reward,
    resolve,
    score_response,
)
from tlt_core.items.types import Prompt, ScoreStatus

PROMPT = Prompt(0, torch.tensor([1], dtype=torch.int32), "2 + 3 =", "5", "chain_sum", {"x": 1})


HOSTILE = "tests.tlt_core.grpo.hostile_rewards"


def python(name: str, weight: float = 1.0) -> RewardFunction:
    return RewardFunction(kind="python", path=f"{HOSTILE}:{name}", weight=weight)


def config(*functions: RewardFunction, timeout_s: float = 20.0, num_processes: int = 1) -> RewardConfig:
    return RewardConfig(functions=functions, timeout_s=timeout_s, num_processes=num_processes)


def item(response: str, answer: str = "5", task: str = "chain_sum") -> Item:
    return Item("2 + 3 =", response, answer, task, {})


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("<think>2 + 3 = 5</think><answer>5</answer>", 1.0),
        ("<answer>4</answer> no, <answer> 5 </answer>", 1.0),  # the last one counts, stripped
        ("<answer>5.</answer>", 1.0),  # a sentence may end
        ("<answer>6.</answer>", 0.0),
        ("<answer>5 or 6</answer>", 0.0),  # partial credit does not
        ("<answer>The answer is 5</answer>", 0.0),
    ],
)
def test_reasoning_gym_is_all_or_nothing(response, expected):
    assert resolve("reasoning_gym", "")(item(response)) == expected


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("<think>a\nb</think>\n<answer>5</answer>", 1.0),
        ("<answer>5</answer>", 0.0),
        ("<think>a</think><answer>5</answer> and more", 0.0),
        ("<think>a<think></think><answer>5</answer>", 0.0),
    ],
)
def test_format(response, expected):
    assert format_reward(item(response)) == expected


def test_an_answer_that_the_task_cannot_read_is_unparseable_not_an_error():
    functions = (("reasoning_gym", ""),)
    outcome = score_response(functions, item("<answer>two</answer>", "2 x 3", "prime_factorization"))
    assert (outcome.components, outcome.status, outcome.message) == ((0.0,), UNPARSEABLE, "")


@pytest.fixture(scope="module")
def scorer():
    with Scorer(config(python("hostile", weight=2.0), timeout_s=2.0)) as one:
        yield one


@pytest.mark.parametrize(
    "response", ["crash", "raise", "unprintable", "exit", "interrupt", "nan", "huge", "none", "sleep", "spin"]
)
def test_a_failing_function_costs_its_sample_only(scorer, response):
    """One process, so the sample behind the bad one is scored by it, or by its replacement."""
    scorer.submit("bad", PROMPT, response)
    scorer.submit("good", PROMPT, "print")
    bad, good = scorer.collect(["bad", "good"])
    assert bad.status == (ScoreStatus.TIMEOUT if response in ("sleep", "spin") else ScoreStatus.ERROR)
    assert (bad.components, bad.total) == ((0.0,), 0.0)
    assert (good.components, good.total, good.status) == ((5.0,), 10.0, ScoreStatus.OK)


def test_a_process_that_somebody_else_kills_costs_no_sample_its_score(tmp_path):
    with Scorer(config(python("killed_once"))) as scorer:
        scorer.submit("hit", PROMPT, str(tmp_path / "was here"))
        (hit,) = scorer.collect(["hit"])
    assert (hit.components, hit.status) == ((5.0,), ScoreStatus.OK)


def test_a_process_that_is_killed_while_it_has_nothing_to_score_is_replaced():
    with Scorer(config(python("hostile"))) as scorer:
        for number in range(3):
            scorer.submit(number, PROMPT, "print")
            (score,) = scorer.collect([number])
            assert (score.components, score.status) == ((5.0,), ScoreStatus.OK)
            for process in psutil.Process().children():
                if "spawn_main" in " ".join(process.cmdline()):
                    process.kill()
            if number == 1:
                time.sleep(1.0)  # the pool has noticed it


def test_a_reward_out_of_range_is_reported_with_its_function_and_sample(caplog):
    """1e39 is finite here, and infinite in the float32 of the advantages."""
    with Scorer(config(python("hostile"))) as scorer:
        scorer.submit((3, 1), PROMPT, "huge")
        assert scorer.collect([(3, 1)])[0].total == 0.0
    assert "sample (3, 1)" in caplog.text
    assert f"{HOSTILE}:hostile: ValueError: the reward is 1e+39" in caplog.text


def test_imports_do_not_count_against_the_time_of_a_sample():
    function = RewardFunction(kind="python", path="tests.tlt_core.grpo.slow_to_import_rewards:one")
    with Scorer(config(function, timeout_s=1.0)) as scorer:
        scorer.submit("one", PROMPT, "any")
        (scored,) = scorer.collect(["one"])
    assert (scored.status, scored.total) == (ScoreStatus.OK, 1.0)


def test_a_failing_term_is_worse_than_an_unparseable_one():
    functions = (("exact", ""), ("python", f"{HOSTILE}:hostile"))
    outcome = score_response(functions, item("raise", "5"))
    assert outcome.components == (0.0, 0.0)
    assert outcome.status == ERROR  # worse than unparseable
    assert outcome.message == f"{HOSTILE}:hostile: KeyError: 'no such thing'"


def test_scoring_processes_do_not_load_torch():
    with Scorer(config(RewardFunction(kind="exact"), python("modules"))) as scorer:
        scorer.submit(0, PROMPT, "<answer>5</answer>")
        assert scorer.collect([0])[0].components == (1.0, 0.0)


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("no_such_module:f", "ModuleNotFoundError"),
        ("math:no_such_function", "AttributeError"),
        ("math:pi", "not callable"),
        (":f", "Empty module name"),
        ("tests.tlt_core.grpo.unimportable_rewards:f", "judge are missing"),
    ],
)
def test_bad_paths_are_found_before_any_work(path, reason):
    with pytest.raises(RewardError, match=f"{path}.*{reason}"):
        check_reward_functions(config(RewardFunction(kind="python", path=path)))
