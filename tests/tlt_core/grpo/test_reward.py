"""Right answers earn 1, everything else 0, and no reward function can end a run."""

import time

import pytest
import torch

from conf.schema import RewardConfig, RewardFunction
from tlt_core.grpo.reward import RewardError, Scorer, check_reward_functions
from tlt_core.grpo.verifiers import Item, Unparseable, extract_answer, format_reward, math_verify_reward, resolve
from tlt_core.types import Prompt, ScoreStatus

PROMPT = Prompt(0, torch.tensor([1], dtype=torch.int32), "2 + 3 =", "5", "chain_sum", {"x": 1})


def config(*functions: str, timeout_s: float = 20.0) -> RewardConfig:
    made = [
        RewardFunction(kind="python", path=f"tests.tlt_core.grpo.hostile_rewards:{f}", weight=2.0)
        if f in ("hang", "crash", "chatty", "broken")
        else RewardFunction(kind=f)
        for f in functions
    ]
    return RewardConfig(functions=tuple(made), timeout_s=timeout_s, num_processes=2)


def item(response: str, answer: str = "5") -> Item:
    return Item("2 + 3 =", response, answer, "chain_sum", {})


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("<think>2 + 3 = 5</think><answer>5</answer>", 1.0),
        ("<answer>4</answer> no, <answer> 5 </answer>", 1.0),  # the last one counts, stripped
        ("<answer>5 or 6</answer>", 0.0),  # partial credit does not
        ("<answer>The answer is 5</answer>", 0.0),
    ],
)
def test_reasoning_gym_is_all_or_nothing(response, expected):
    assert resolve("reasoning_gym", "")(item(response)) == expected


def test_answers_are_extracted_or_reported():
    assert extract_answer("x <answer>\n7 </answer>") == "7"
    with pytest.raises(Unparseable):
        extract_answer("the answer is 7")


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [(r"\boxed{\frac{1}{2}}", "0.5", 1.0), ("<answer>12</answer>", "12", 1.0), ("<answer>13</answer>", "12", 0.0)],
)
def test_math_verify(response, answer, expected):
    assert math_verify_reward(item(response, answer)) == expected


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


def test_components_weights_and_unparseable():
    with Scorer(config("reasoning_gym", "format")) as scorer:
        scorer.submit("right", PROMPT, "<think>x</think><answer>5</answer>")
        scorer.submit("none", PROMPT, "no answer here")
        right, none = scorer.collect(["right", "none"])
    assert (right.components, right.total, right.status) == ((1.0, 1.0), 2.0, ScoreStatus.OK)
    assert (none.total, none.status) == (0.0, ScoreStatus.UNPARSEABLE)


def test_hanging_crashing_and_raising_functions_cost_their_sample_only():
    """A hang is killed at the limit; the other process goes on meanwhile."""
    started = time.perf_counter()
    for bad, status in (("hang", ScoreStatus.TIMEOUT), ("crash", ScoreStatus.ERROR), ("broken", ScoreStatus.ERROR)):
        with Scorer(config(bad, "exact", timeout_s=8.0 if bad == "hang" else 30.0)) as scorer:
            scorer.submit(0, PROMPT, "<answer>5</answer>")
            assert scorer.collect([0])[0].status == status
    with Scorer(config("chatty")) as scorer:
        scorer.submit(0, PROMPT, "abc")
        assert scorer.collect([0])[0].total == 6.0
    assert time.perf_counter() - started < 120


def test_bad_paths_are_found_before_any_work():
    for path in ("no_such_module:f", "math:no_such_function", "math:pi"):
        with pytest.raises(RewardError, match=path):
            check_reward_functions(RewardConfig(functions=(RewardFunction(kind="python", path=path),)))
