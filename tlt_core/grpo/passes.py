"""Which responses one forward and backward pass computes together.

A pass stays within a pack of groups, and depends on nothing else.  So it can be computed as soon as the pack has been
scored (`run/streamed_update`), with the same gradient wherever and whenever that happens.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from conf.update import AlgorithmConfig, UpdateConfig
from tlt_core.items.types import FinishReason, RolloutBatch, ScoredBatch

Key = tuple[int, int]
"""Pack of a pass, and its number: 0, 1, ... with a gradient, -1, -2, ... without one.  Dynamic sampling drops groups
without a gradient later, which must not change the others' numbers."""


class Pass(NamedTuple):
    """Responses that one forward and backward pass computes together, as rows of the rollout batch."""

    key: Key
    rows: list[int]
    needs_grad: bool  # False: all advantages are 0 and so is the gradient; the pass only measures


def packs(prompt_ids: Sequence[int], prompt_lens: Sequence[int], *, groups_per_pack: int) -> dict[int, int]:
    """Pack of each prompt, numbered from the longest prompts down.

    A long prompt often has long responses, which fill passes by themselves and end late.  So prompts of similar length
    go together, and packs grow towards short ones: 1, 1, 2, 2, 3, 3, ... groups, at most `groups_per_pack`."""
    waiting = sorted(range(len(prompt_ids)), key=lambda i: (-prompt_lens[i], -prompt_ids[i]))
    result: dict[int, int] = {}
    pack = 0
    while waiting:
        size = min(1 + pack // 2, groups_per_pack)
        result |= {prompt_ids[i]: pack for i in waiting[:size]}
        waiting, pack = waiting[size:], pack + 1
    return result


def kept(rollouts: RolloutBatch, algorithm: AlgorithmConfig) -> Tensor:
    """Which responses are trained on, [R] bool."""
    if algorithm.mask_truncated:
        return rollouts.finish_R != FinishReason.LENGTH
    return torch.ones(len(rollouts), dtype=torch.bool)


def make_passes(
    scored: ScoredBatch,
    rows: Sequence[int],
    cfg: UpdateConfig,
    algorithm: AlgorithmConfig,
    *,
    pack_of: Mapping[int, int],
) -> list[Pass]:
    """Passes of at most `cfg.tokens_per_micro_batch` tokens; a longer sequence gets a pass of its own.

    rows: in canonical order.  Those of a pack give the same passes whatever other rows there are.
    """
    rollouts = scored.rollouts
    prompts: list[int] = rollouts.prompt_ids_R.tolist()
    cost = tokens_added(rollouts.prompt_ids_R, rollouts.prompt_lens_R, rollouts.response_lens_R)
    skips = skips_zero_advantage(cfg, algorithm)
    by_pack: dict[tuple[int, bool], list[int]] = {}
    for row in rows:
        needs_grad = not skips or float(scored.advantages_R[row]) != 0
        by_pack.setdefault((pack_of[prompts[row]], needs_grad), []).append(row)
    return [
        Pass((pack, number if needs_grad else -1 - number), run, needs_grad)
        for (pack, needs_grad), members in by_pack.items()
        for number, run in enumerate(fill(members, cost, budget=cfg.tokens_per_micro_batch))
    ]


def power_of_two(count: int) -> int:
    """The smallest power of two that is at least `count`."""
    return 1 << max(count - 1, 0).bit_length()


def skips_zero_advantage(cfg: UpdateConfig, algorithm: AlgorithmConfig) -> bool:
    """Whether sequences with advantage 0 get no backward pass: their gradient is 0 when the loss is proportional to the
    advantage.  Never under DeepSpeed, where all workers must make the same passes."""
    kl_in_loss = algorithm.kl.coef > 0 and algorithm.kl.place == "loss"
    return cfg.backend.kind == "torch" and not kl_in_loss


Cost = Callable[[int, Sequence[int]], int]
"""cost(item, run): tokens that an item adds to a run."""


def tokens_added(prompt_ids_S: Tensor, prompt_lens_S: Tensor, response_lens_S: Tensor) -> Cost:
    """Of sequences: responses to one prompt that follow each other share it."""
    prompts, lens, responses = prompt_ids_S.tolist(), prompt_lens_S.tolist(), response_lens_S.tolist()

    def cost(sequence: int, run: Sequence[int]) -> int:
        shared = bool(run) and prompts[run[-1]] == prompts[sequence]
        return int(responses[sequence] + (0 if shared else lens[sequence]))

    return cost


def fill(order: Sequence[int], cost: Cost, *, budget: int) -> Iterator[list[int]]:
    """Split `order` into runs of at most `budget` tokens, at least one item each."""
    run: list[int] = []
    used = 0
    for item in order:
        if run and used + cost(item, run) > budget:
            yield run
            run, used = [], 0
        used += cost(item, run)
        run.append(item)
    if run:
        yield run
