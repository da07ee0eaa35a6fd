"""What a drafter returns is read as int64 arrays of one length."""

import pytest
import torch

from tlt_core.items.speculation import DraftTree, LiveView, Strategy
from tlt_core.items.types import SamplingParams
from tlt_core.rollout.draft_check import DraftError, check_tree

GOOD = DraftTree.of_lists([5, 6], [-1, 0], [0, 0], [1, 2])
VIEW = LiveView([], torch.zeros(1, 1), [1], [9], torch.zeros(1), SamplingParams())


@pytest.mark.parametrize("array", DraftTree._fields)
def test_another_type_or_length_is_refused(array: str) -> None:
    check_tree(GOOD, VIEW, Strategy("d", 2, 1, 2), vocab_size=64)
    values = getattr(GOOD, array)
    for wrong in (values.int(), values.double(), values[None], torch.cat([values, values])):
        with pytest.raises(DraftError, match="must be int64 of one length"):
            check_tree(GOOD._replace(**{array: wrong}), VIEW, Strategy("d", 2, 1, 2), vocab_size=64)
