"""One RL step of N workers, event by event.  Times in seconds, amounts of work in tokens.

    queue of requests --pull--> live requests of a worker --rates--> responses end --> idle worker
                                                                        '-- groups that have ended: passes of the update

A worker with n live requests decodes each of them at `rates(n)` tokens a second, so between two events everything is
linear.  Requests are dealt as `cluster/dispatcher` deals them with dispatch=pull.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

FORWARD = 1 / 3  # of a trained token's operations: a forward pass alone
BINS = (1, 2, 4, 8, 16, 32, 64, 1 << 30)
"""Largest number of live requests of each bin of `Rates`."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens a second of one request by the number of live ones on its worker: one entry for each of `BINS`."""

    by_bin: tuple[float, ...]

    def __call__(self, live: int) -> float:
        """Rate at `live` requests."""
        return self.by_bin[bin_of(live)]


class Group(NamedTuple):
    """A prompt's responses.  Group.of([30, 20]) == Group((30, 20), trained=50)"""

    lengths: Sequence[int]  # tokens of each response, in the order of sampling
    trained: float  # tokens of the update's passes with a gradient, the prompt's among them
    measured: float = 0.0  # ... of the passes without: their advantage is 0

    @classmethod
    def of(cls, lengths: Sequence[int]) -> "Group":
        """Trained on as a whole, with a prompt of no length."""
        return cls(tuple(lengths), trained=sum(lengths))


Rate = Callable[[int], float]
"""Tokens a second of one request by the number of live ones on its worker: `Rates`, or of a GPU (`gpu`)."""


class Costs(NamedTuple):
    """What a step costs besides decoding."""

    update_token_s: float  # worker seconds of one trained token in the update
    update_fixed_s: float  # of each update, on all workers at once: sum of gradients, optimizer, publish
    rollout_fixed_s: float  # of each rollout: calls, results
    other_s: float  # rest of the step


class Step(NamedTuple):
    """A simulated step."""

    rollout_s: float
    update_s: float
    step_s: float
    idle_s: float  # worker seconds without requests while others decode
    streamed_share: float  # of the update's tokens, computed in idle time


@dataclass(slots=True)
class _Worker:
    """Live requests as a heap of (`done` when it ends, its number, group, `done` when it began)."""

    live: list[tuple[float, int, int, float]]
    done: float = 0.0  # tokens that each live request has decoded since the start
    at_s: float = 0.0


def bin_of(live: int) -> int:
    """Index into `BINS`."""
    return next(i for i, most in enumerate(BINS) if live <= most)


def simulate(
    groups: Sequence[Group], rates: Rate, costs: Costs, *, workers: int, max_live: int, streams: bool = False
) -> Step:
    """One step.  groups: in the order of sampling.  streams: idle workers compute the gradients of groups that have
    ended, one group at a time."""
    ends = decode(groups, rates, workers=workers, max_live=max_live)
    over_s = max(ends.worker_s)
    idle_s = sum(over_s - s for s in ends.worker_s)
    trained = [group.trained for group in groups]
    streamed = _streamed(trained, ends, over_s, costs.update_token_s) if streams else 0.0
    update_s = update_seconds(work(groups) - streamed, costs, workers=workers)
    rollout_s = over_s + costs.rollout_fixed_s
    return Step(rollout_s, update_s, rollout_s + update_s + costs.other_s, idle_s, streamed / max(sum(trained), 1))


def work(groups: Sequence[Group]) -> float:
    """Of their update, in trained tokens."""
    return sum(group.trained + FORWARD * group.measured for group in groups)


def update_seconds(tokens: float, costs: Costs, *, workers: int) -> float:
    """Of an update whose `work` is so many tokens."""
    return tokens * costs.update_token_s / workers + costs.update_fixed_s


class Ends(NamedTuple):
    """When work has ended, in seconds since the rollout began."""

    worker_s: list[float]  # of each worker: its last request
    group_s: list[float]  # of each group: its last response
    marks_s: list[float]  # when the 1st, 2nd, ... `mark` responses had ended
    before_mark: float  # tokens that were decoded before the last mark that their response has seen


def decode(groups: Sequence[Group], rates: Rate, *, workers: int, max_live: int, mark: int = 1 << 62) -> Ends:
    """Decode all responses.  mark: a mark is made after every so many responses."""
    queue = deque((length, g) for g, group in enumerate(groups) for length in group.lengths)
    responses, missing = len(queue), [len(group.lengths) for group in groups]
    outstanding = responses
    group_s, marks_s, team = [0.0] * len(groups), list[float](), [_Worker([]) for _ in range(workers)]
    numbers, seen = itertools.count(), dict[int, float]()  # tokens of each response at the last mark

    def pull(worker: _Worker) -> None:
        fair = -(-outstanding // workers)
        while queue and len(worker.live) < min(max_live, fair):
            length, group = queue.popleft()
            heapq.heappush(worker.live, (worker.done + length, next(numbers), group, worker.done))

    def next_end_s(worker: _Worker) -> float:
        return worker.at_s + (worker.live[0][0] - worker.done) / rates(len(worker.live))

    def see(worker: _Worker, at_s: float) -> None:
        for _, number, _, first in worker.live:
            seen[number] = worker.done + (at_s - worker.at_s) * rates(len(worker.live)) - first

    for worker in team:
        pull(worker)
    while busy := [worker for worker in team if worker.live]:
        worker = min(busy, key=next_end_s)
        worker.at_s = next_end_s(worker)
        worker.done, _, group, _ = heapq.heappop(worker.live)
        outstanding -= 1
        missing[group] -= 1
        if not missing[group]:
            group_s[group] = worker.at_s
        if (responses - outstanding) % mark == 0:
            marks_s.append(worker.at_s)
            for other in team:
                see(other, worker.at_s)
        pull(worker)
        for other in team:  # who had no request when the queue was longer than its fair share
            if not other.live and queue:
                other.at_s = worker.at_s
                pull(other)
    return Ends([worker.at_s for worker in team], group_s, marks_s, sum(seen.values()))


def _streamed(trained: Sequence[float], ends: Ends, over_s: float, token_s: float) -> float:
    """Tokens of the groups whose gradients idle workers finish before the rollout is over."""
    free = [(s, w) for w, s in enumerate(ends.worker_s) if s < over_s]
    heapq.heapify(free)
    done = 0.0
    for ended_s, count in sorted(zip(ends.group_s, trained, strict=True)):
        if not free:
            break
        at_s, worker = heapq.heappop(free)
        end_s = max(at_s, ended_s) + count * token_s
        if end_s <= over_s:
            done += count
            heapq.heappush(free, (end_s, worker))
    return done
