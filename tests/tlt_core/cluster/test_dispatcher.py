"""Who gets which request, and when a phase is over."""

import time

import pytest
import torch

from tlt_core.cluster.dispatcher import Dispatcher
from tlt_core.cluster.engines import Engines
from tlt_core.idle_training.coordinator import Action, Progress
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


def test_pull_gives_a_fair_share_however_greedy_the_first_worker_is():
    dispatcher = begun("pull")
    assert len(dispatcher.pull(0, 100).requests) == 4
    assert len(dispatcher.pull(0, 100).requests) == 0
    answer = dispatcher.pull(1, 100)
    assert len(answer.requests) == 4
    assert answer.exhausted


def test_static_deals_whole_groups():
    dispatcher = begun("static", num_groups=3)
    first, exhausted = dispatcher.pull(0, 100)
    assert exhausted
    assert [r.key.prompt_id for r in first] == [0, 0, 2, 2]
    assert [r.key.prompt_id for r in dispatcher.pull(1, 100).requests] == [1, 1]


def test_rollout_ends_when_the_last_response_is_in():
    dispatcher = begun("static", num_groups=2, size=1)
    requests = [dispatcher.pull(w, 9).requests[0] for w in range(2)]
    dispatcher.push(0, finish(requests[0]))
    assert dispatcher.ask(Progress(0, 0, time.time(), has_data=True)).action is Action.WAIT
    assert len(dispatcher.drain().finished) == 1
    assert dispatcher.drain().live == (0, 1)
    dispatcher.push(1, finish(requests[1]))
    assert dispatcher.ask(Progress(0, 0, time.time(), has_data=True)).action is Action.STOP
    assert len(dispatcher.drain().finished) == 1


@pytest.mark.parametrize("dispatch", ["pull", "static"])
def test_workers_that_share_an_engine_wait_until_it_has_nothing_to_decode(dispatch):
    dispatcher = begun(dispatch, num_groups=2, size=2, workers=4, each=2)
    first, second = dispatcher.pull(0, 9).requests, dispatcher.pull(2, 9).requests
    assert (len(first), len(second)) == (2, 2), "requests are shared among engines, not workers"
    assert dispatcher.pull(1, 9) == dispatcher.pull(3, 9) == ((), False)
    for request in first:
        dispatcher.push(0, finish(request))
    assert not dispatcher.pull(1, 9).exhausted, "the host has not said yet that it is done"
    dispatcher.ask(Progress(0, 0, time.time(), has_data=True))
    assert dispatcher.pull(1, 9) == ((), True)
    assert not dispatcher.pull(3, 9).exhausted
    assert dispatcher.ask(Progress(1, 0, time.time(), has_data=True)).action is Action.WAIT
    for request in second:
        dispatcher.push(2, finish(request))
    assert dispatcher.ask(Progress(1, 0, time.time(), has_data=True)).action is Action.STOP
