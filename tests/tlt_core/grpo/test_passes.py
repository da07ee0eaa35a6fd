"""How sequences are put into passes of a budget of tokens."""

from types import SimpleNamespace

import torch

from tlt_core.grpo.micro_batch import _filled
from tlt_core.grpo.passes import fill, power_of_two


def test_runs_are_filled_up_to_the_budget_and_hold_at_least_one() -> None:
    sizes = [3, 3, 3, 9, 2]
    assert list(fill(range(5), lambda item, run: sizes[item], budget=6)) == [[0, 1], [2], [3], [4]]


def test_siblings_in_one_pass_count_their_prompt_once() -> None:
    batch = SimpleNamespace(
        prompt_ids_S=torch.tensor([1, 1, 1, 2]),
        prompt_lens_S=torch.tensor([4, 4, 4, 4]),
        response_lens_S=torch.tensor([3, 3, 3, 3]),
    )
    live_S = torch.ones(4, dtype=torch.bool)
    assert list(_filled(batch, live_S, 13)) == [[0, 1, 2], [3]], "4 + 3 + 3 + 3 tokens"
    assert list(_filled(batch, live_S, 12)) == [[0, 1], [2], [3]], "a new prompt does not fit beside the third"


def test_power_of_two() -> None:
    assert [power_of_two(n) for n in (0, 1, 2, 3, 4, 5, 9)] == [1, 1, 2, 4, 4, 8, 16]
