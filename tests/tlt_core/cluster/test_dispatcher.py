"""Who gets which request, and when a phase is over."""

import pytest
import torch

from tlt_core.cluster.dispatcher import Dispatcher
from tlt_core.cluster.engines import Engines
from tlt_core.items.types import FinishReason, GenerationRequest, NoiseKey, Rollout


def groups(num_groups: int, size: int) -> list[list[GenerationRequest]]:
    tokens = torch.tensor([1], dtype=torch.int32)
    return [[GenerationRequest(NoiseKey(0, 0, g, s), tokens) for s in range(size)] for g in range(num_groups)]


def finish(request: GenerationRequest) -> Rollout:
    return Rollout(request.key, torch.tensor([1, 2], dtype=torch.int32), 1, torch.zeros(1), FinishReason.STOP, 0)


def begun(dispatch: str, *, num_groups: int = 4, size: int = 2, workers: int = 2, each: int = 1) -> Dispatcher:
    dispatcher = Dispatcher()
    dispatcher.begin(groups(num_groups, size), engines=Engines(workers, each), dispatch=dispatch)
    return dispatcher


@pytest.mark.parametrize("each", [1, 2])
def test_pull_gives_a_fair_share_however_greedy_the_first_engine_is(each):
    dispatcher = begun("pull", workers=2 * each, each=each)
    assert len(dispatcher.pull(0, 100).requests) == 4
    assert len(dispatcher.pull(0, 100).requests) == 0
    answer = dispatcher.pull(each, 100)
    assert len(answer.requests) == 4
    assert answer.exhausted


def test_static_deals_whole_groups():
    dispatcher = begun("static", num_groups=3)
    first, exhausted, _ = dispatcher.pull(0, 100)
    assert exhausted
    assert [r.key.prompt_id for r in first] == [0, 0, 2, 2]
    assert [r.key.prompt_id for r in dispatcher.pull(1, 100).requests] == [1, 1]
