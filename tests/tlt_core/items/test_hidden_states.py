"""Hidden states follow the rows of the live batch: they are shared, moved, given back, and read where they belong."""

import pytest
import torch

from tlt_core.items.hidden_states import HiddenStates


@pytest.fixture
def hidden():
    return HiddenStates((0, 2), hidden_size=3, max_live=3, max_len=5, dtype=torch.float32, device=torch.device("cpu"))


def states(*values):
    return torch.tensor(values, dtype=torch.float32)[:, None].expand(-1, 6)


def row(hidden, number, length):
    return hidden.read(torch.full((length,), number), torch.arange(length))[:, 0].tolist()


def test_each_state_is_read_where_it_was_recorded(hidden):
    hidden.record_prompt(0, states(1, 2))
    hidden.record(torch.tensor([2, 0, 2]), torch.tensor([1, 2, 0]), states(21, 3, 20))
    assert row(hidden, 0, 3) == [1, 2, 3]
    assert row(hidden, 2, 2) == [20, 21]


def test_a_sibling_takes_the_states_of_the_prompt_alone(hidden):
    hidden.record_prompt(0, states(1, 2, 3))
    hidden.share(0, 1, 2)
    assert row(hidden, 1, 3) == [1, 2, 0]
    hidden.record(torch.tensor([0]), torch.tensor([0]), states(9))
    assert row(hidden, 1, 1) == [1], "a copy, not the same memory"


def test_rows_that_move_take_their_slots_along(hidden):
    for number in range(3):
        hidden.record_prompt(number, states(10 * number, 10 * number + 1))
    before = hidden.taps_SCE.clone()
    hidden.move(2, 0)
    assert torch.equal(hidden.taps_SCE, before), "nothing is copied"
    assert row(hidden, 0, 2) == [20, 21]
    assert row(hidden, 1, 2) == [10, 11]
    hidden.record_prompt(2, states(30, 31))  # a new request in the freed row
    assert row(hidden, 0, 2) == [20, 21]
    assert row(hidden, 2, 2) == [30, 31]
    assert [hidden.slot(number) for number in range(3)] == hidden.slots_B.tolist() == [2, 1, 0]
