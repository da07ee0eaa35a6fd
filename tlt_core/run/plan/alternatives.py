"""Step times of other ways to deal with the tail, from the same lengths and costs; none of them speculates.

Each has a price, which is reported beside its time:

    stale   share of the trained tokens that an older policy wrote
    bias    mean length of the responses that are trained on, over the mean of all, minus 1
"""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from tlt_core.run.plan.simulate import Costs, Group, Rate, decode, simulate, update_seconds, work

_MORE = 4  # one group more for every four: a quarter
Groups = Sequence[Group]


class Plan(NamedTuple):
    """Plan("over-provisioning", 14.2, 0.0, -0.11)"""

    name: str
    step_s: float
    stale: float
    bias: float


def alternatives(steps: Sequence[Groups], rates: Rate, costs: Costs, *, workers: int, max_live: int) -> list[Plan]:
    """steps: groups of each step.  Those that need more than one worker are left out for one."""
    size = {"workers": workers, "max_live": max_live}
    found = [_over_provisioning(steps, rates, costs, **size), _tail_batching(steps, rates, costs, **size)]
    if workers > 1:
        found.append(_one_step_off(steps, rates, costs, **size))
    return [*found, _partial_rollout(steps, rates, costs, **size)]


def _over_provisioning(steps: Sequence[Groups], rates: Rate, costs: Costs, *, workers: int, max_live: int) -> Plan:
    """A quarter more groups are sampled; the step ends with as many as it needs, and drops the rest."""
    seconds, kept, everything = [], list[int](), list[int]()
    for groups, more in zip(steps, _shifted(steps), strict=True):
        sampled = [*groups, *more[: max(1, len(groups) // _MORE)]]
        ends = decode(sampled, rates, workers=workers, max_live=max_live)
        first = [g for _, g in sorted(zip(ends.group_s, range(len(sampled)), strict=True))][: len(groups)]
        chosen = [sampled[g] for g in first]
        over_s = max(ends.group_s[g] for g in first) + costs.rollout_fixed_s
        seconds.append(over_s + update_seconds(work(chosen), costs, workers=workers) + costs.other_s)
        kept += [length for group in chosen for length in group.lengths]
        everything += [length for group in sampled for length in group.lengths]
    bias = statistics.fmean(kept) / statistics.fmean(everything) - 1
    return Plan("over-provisioning by a quarter", statistics.fmean(seconds), 0.0, bias)


def _tail_batching(steps: Sequence[Groups], rates: Rate, costs: Costs, *, workers: int, max_live: int) -> Plan:
    """As above, but dropped groups are sampled together in every fifth step.  So no length is lost."""
    short = _over_provisioning(steps, rates, costs, workers=workers, max_live=max_live)
    groups = sorted((g for step in steps for g in step), key=lambda g: max(g.lengths), reverse=True)
    longest = groups[: max(len(groups) // (_MORE + 1), 1)]
    size = len(steps[0])
    batches = [longest[i : i + size] for i in range(0, len(longest), size)]
    whole = [b for b in batches if len(b) == size] or batches[:1]
    long_s = statistics.fmean(simulate(b, rates, costs, workers=workers, max_live=max_live).step_s for b in whole)
    return Plan("tail batching, one step in five", (_MORE * short.step_s + long_s) / (_MORE + 1), 0.0, 0.0)


def _one_step_off(steps: Sequence[Groups], rates: Rate, costs: Costs, *, workers: int, max_live: int) -> Plan:
    """Half of the workers sample the next step while the others update on this one."""
    half = workers // 2
    seconds = []
    for groups in steps:
        own = simulate(groups, rates, costs, workers=half, max_live=max_live)
        update_s = update_seconds(work(groups), costs, workers=workers - half)
        seconds.append(max(own.rollout_s, update_s) + costs.other_s)
    return Plan("one step off, on halves of the workers", statistics.fmean(seconds), 1.0, 0.0)


def _partial_rollout(steps: Sequence[Groups], rates: Rate, costs: Costs, *, workers: int, max_live: int) -> Plan:
    """The step ends with as many responses as it needs; those under way go on with the next policy."""
    queue = [group for step in steps for group in step]
    tokens = sum(sum(group.lengths) for group in queue)
    needed = sum(len(group.lengths) for group in steps[0])
    ends = decode(queue, rates, workers=workers, max_live=max_live, mark=needed)
    full = max(len(ends.marks_s) - 1, 1)  # the last one waits for the longest: not so in a run that goes on
    rollout_s = ends.marks_s[full - 1] / full + costs.rollout_fixed_s
    update_s = update_seconds(work(queue) / len(steps), costs, workers=workers)
    return Plan("partial rollout", rollout_s + update_s + costs.other_s, ends.before_mark / tokens, 0.0)


def _shifted(steps: Sequence[Groups]) -> list[Groups]:
    """The step after each; after the last comes the first."""
    return [*steps[1:], steps[0]]
