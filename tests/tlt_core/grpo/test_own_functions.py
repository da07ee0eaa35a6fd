"""Functions of one's own: async ones, ones for whole batches, and ones that cannot be called as they will be."""

import pytest
import torch

from conf.reward import RewardConfig, RewardFunction
from tlt_core.grpo.reward import RewardError, Scorer, check_reward_functions, require_scores
from tlt_core.items.types import Prompt, ScoreStatus

PROMPT = Prompt(0, torch.tensor([1], dtype=torch.int32), "2 + 3 =", "5", "chain_sum", {})
OWN = "tests.tlt_core.grpo.batch_rewards"


def own(name: str, **settings: object) -> RewardFunction:
    return RewardFunction(kind="python", path=f"{OWN}:{name}", **settings)


def scored(config: RewardConfig, responses: list[str]) -> list:
    with Scorer(config) as scorer:
        for number, response in enumerate(responses):
            scorer.submit(number, PROMPT, response)
        assert scorer.is_ready(range(len(responses)), within_s=200)
        return scorer.collect(range(len(responses)))


def test_a_batch_function_gets_all_that_wait_and_stands_beside_others() -> None:
    functions = (RewardFunction(kind="exact"), own("lengths", batch=True, weight=0.5), own("judge"))
    scores = scored(RewardConfig(functions=functions, timeout_s=60), ["<answer>5</answer>", "none", "x"])
    assert [score.components for score in scores] == [(1.0, 318.0, 0.5), (0.0, 304.0, 0.5), (0.0, 301.0, 0.5)]
    assert [score.total for score in scores] == [1.0 + 159 + 0.5, 152 + 0.5, 150.5 + 0.5]
    assert [score.status for score in scores] == [ScoreStatus.OK, ScoreStatus.UNPARSEABLE, ScoreStatus.UNPARSEABLE]


def test_those_that_come_later_make_another_batch() -> None:
    with Scorer(RewardConfig(functions=(own("lengths", batch=True),), timeout_s=60)) as scorer:
        for number in range(3):
            scorer.submit(number, PROMPT, "x")
        assert [s.total for s in scorer.collect([1])] == [301.0]
        scorer.submit(3, PROMPT, "xx")
        assert [s.total for s in scorer.collect([3, 0, 2])] == [102.0, 301.0, 301.0]


@pytest.mark.parametrize(
    ("bad", "status"),
    [
        ("raise", ScoreStatus.ERROR),
        ("nan", ScoreStatus.ERROR),
        ("crash", ScoreStatus.ERROR),
        ("sleep", ScoreStatus.TIMEOUT),
    ],
)
def test_a_bad_response_costs_no_other_of_its_batch_a_score(bad: str, status: ScoreStatus) -> None:
    config = RewardConfig(functions=(own("fragile", batch=True),), timeout_s=2)
    good, hit, also_good = scored(config, ["a", bad, "b"])
    assert (good.total, good.status) == (1.0, ScoreStatus.OK)
    assert (also_good.total, also_good.status) == (1.0, ScoreStatus.OK)
    assert (hit.total, hit.status) == (0.0, status)


def test_a_list_of_another_length_is_an_error() -> None:
    (score,) = scored(RewardConfig(functions=(own("too_few", batch=True),), timeout_s=60), ["a"])
    assert score.status is ScoreStatus.ERROR
    assert "returned 0 rewards for 1 responses" in score.message


def test_async_functions_are_run() -> None:
    config = RewardConfig(functions=(own("judge"), own("judges", batch=True)), timeout_s=60)
    assert [score.components for score in scored(config, ["5", "6", "5"])] == [(1.0, 1.0), (0.5, 0.5), (1.0, 1.0)]


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (own("positional"), "metadata"),
        (own("judge", batch=True), "f(prompts=, responses=, answers=, metadata=)"),
        (own("lengths"), "f(prompt=, response=, answer=, metadata=)"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_before_any_work(function: RewardFunction, why: str) -> None:
    with pytest.raises(RewardError) as refused:
        check_reward_functions(RewardConfig(functions=(function,)))
    assert function.path in str(refused.value)
    assert why in str(refused.value)


def test_a_step_without_any_score_is_the_end_of_the_run() -> None:
    config = RewardConfig(functions=(RewardFunction(kind="exact"), own("fragile", batch=True)), timeout_s=60)
    scores = scored(config, ["raise", "<answer>5</answer>", "nan"])
    require_scores(scores)  # one of them is good
    with pytest.raises(RewardError, match=r"failed for all 2 responses of this step.*KeyError: 'no such thing'"):
        require_scores([scores[0], scores[2]])
