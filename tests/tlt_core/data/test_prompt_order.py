"""The data order is an even mixture, a permutation per epoch, and one integer is all its state."""

import torch

from tlt_core.data.prompt_order import PromptOrder
from tlt_core.items.types import Prompt


def prompts() -> list[Prompt]:
    tokens = torch.tensor([1], dtype=torch.int32)
    kinds = [0] * 12 + [1] * 4
    return [Prompt(i, tokens, str(i), "", "t", {"mixture": k}) for i, k in enumerate(kinds)]


def ids(chosen: list[Prompt]) -> list[int]:
    return [p.id for p in chosen]


def test_every_step_has_the_mixture_in_its_proportions():
    order = PromptOrder(prompts(), seed=3)
    for _ in range(8):  # two epochs of four steps
        assert sorted(p.metadata["mixture"] for p in order.take(4)) == [0, 0, 0, 1]


def test_an_epoch_is_a_permutation_and_epochs_differ():
    order = PromptOrder(prompts(), seed=0)
    first, second = ids(order.take(16)), ids(order.take(16))
    assert sorted(first) == sorted(second) == list(range(16))
    assert first != second
    assert first != ids(PromptOrder(prompts(), seed=1).take(16))
    assert order.epoch == 2.0


def test_no_prompt_comes_twice_in_a_step():
    order = PromptOrder(prompts(), seed=0)
    steps = [ids(order.take(6)) for _ in range(8)]  # the third crosses the end of the first epoch
    assert all(len(set(step)) == 6 for step in steps)
    assert set().union(*steps[:3]) == set(range(16))
    resumed = PromptOrder(prompts(), seed=0, cursor=12)
    assert [ids(resumed.take(6)) for _ in range(6)] == steps[2:]


def test_prompts_that_were_taken_are_passed_over():
    order = PromptOrder(prompts(), seed=0)
    first = ids(order.take(10))
    assert sorted(first + ids(order.take(99, without=first))) == list(range(16))
    assert order.take(1, without=range(16)) == []


def test_a_resumed_order_goes_on_with_the_next_prompt():
    whole = PromptOrder(prompts(), seed=0)
    expected = [ids(whole.take(5)) for _ in range(6)]
    resumed = PromptOrder(prompts(), seed=0, cursor=15)
    assert [ids(resumed.take(5)) for _ in range(3)] == expected[3:]
