"""From one worker's share of an optimizer step to single forward/backward passes, packed back to back.

Shapes: U input tokens, Q attention segments, C sampled completion tokens, S sequences of the share.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from tlt_core.grpo.batch import TrainBatch
from tlt_core.grpo.passes import fill, tokens_added
from tlt_core.items.types import offsets_of


class MicroBatch(NamedTuple):
    """Some sequences of a share, ready for one pass over U input tokens in Q attention segments.

    The last token of a sequence predicts nothing and is left out.  A prompt with several responses is fed once, as its
    own segment; the segment of a response reads the keys of the prompt and then its own.
    """

    tokens_U: Tensor  # int32
    positions_U: Tensor  # int64, index in the sequence
    offsets_Q1: Tensor  # int64, segments in input tokens
    keys: Tensor | None  # int64, input tokens whose keys the segments read; None: each segment reads its own
    key_offsets_Q1: Tensor  # int64, segments in `keys`
    outputs_C: Tensor  # int64, input tokens whose output predicts a sampled token
    targets_C: Tensor  # int64, the sampled tokens
    place_C: Tensor  # int64, where they are in the share's arrays of completion tokens
    sequence_C: Tensor  # int64, which of the share's sequences they belong to
    needs_grad: bool  # False: the gradient is known to be 0, so the pass only measures


def micro_batches(batch: TrainBatch, *, token_budget: int, skip_zero_advantage: bool) -> Iterator[MicroBatch]:
    """The passes of a share: those it was made of, otherwise passes of at most `token_budget` tokens (a longer sequence
    gets its own).  skip_zero_advantage: sequences whose advantage is 0 have their own passes, without gradient."""
    live_S = batch.advantages_S != 0 if skip_zero_advantage else torch.ones(len(batch), dtype=torch.bool)
    dealt = None
    if batch.passes_S is not None:
        counts = batch.passes_S.unique_consecutive(return_counts=True)[1]
        dealt = [part.tolist() for part in torch.arange(len(batch)).split(counts.tolist())]
    for chosen in _filled(batch, live_S, token_budget) if dealt is None else dealt:
        yield _micro_batch(batch, chosen, needs_grad=bool(live_S[chosen[0]]))


def _filled(batch: TrainBatch, live_S: Tensor, token_budget: int) -> Iterator[list[int]]:
    cost = tokens_added(batch.prompt_ids_S, batch.prompt_lens_S, batch.response_lens_S)
    for needs_grad in (True, False):
        yield from fill((live_S == needs_grad).nonzero().flatten().tolist(), cost, budget=token_budget)


def idle_micro_batch() -> MicroBatch:
    """A pass over one token that predicts nothing, for a worker without work that must join the collectives."""
    none, one = torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    bounds = torch.tensor([0, 1])
    return MicroBatch(one.int(), one, bounds, None, bounds, none, none, none, none, needs_grad=True)


def _micro_batch(batch: TrainBatch, chosen: Sequence[int], *, needs_grad: bool) -> MicroBatch:
    starts, prompt_lens = batch.offsets_S1.tolist(), batch.prompt_lens_S.tolist()
    responses, places = batch.response_lens_S.tolist(), offsets_of(batch.response_lens_S).tolist()
    source: list[Tensor] = []  # input tokens, as indexes into the share's tokens
    positions: list[Tensor] = []
    segments: list[tuple[int, Tensor]] = []  # number of input tokens, and the input tokens whose keys they read
    outputs: list[Tensor] = []
    used = 0
    for _, group in groupby(chosen, key=lambda s: int(batch.prompt_ids_S[s])):
        members = list(group)
        first, prompt = members[0], torch.arange(used, used + prompt_lens[members[0]])
        source.append(starts[first] + torch.arange(len(prompt)))
        positions.append(torch.arange(len(prompt)))
        used += len(prompt)
        if len(members) > 1:
            segments.append((len(prompt), prompt))
        for s in members:
            own = torch.arange(used, used + responses[s] - 1)
            source.append(starts[s] + prompt_lens[s] + torch.arange(len(own)))
            positions.append(prompt_lens[s] + torch.arange(len(own)))
            used += len(own)
            outputs += [prompt[-1:], own]  # the prompt's last token predicts the first of the response
            queries = len(own) + (len(prompt) if len(members) == 1 else 0)
            if queries:
                segments.append((queries, torch.cat([prompt, own])))
    lengths = torch.tensor([n for n, _ in segments])
    key_lengths = torch.tensor([len(keys) for _, keys in segments])
    chosen_S = torch.tensor(chosen)
    place = torch.cat([torch.arange(places[s], places[s + 1]) for s in chosen])
    sampled = batch.sampled_C[place]
    completions = torch.cat([batch.tokens_T[starts[s] + prompt_lens[s] : starts[s + 1]] for s in chosen])
    return MicroBatch(
        tokens_U=batch.tokens_T[torch.cat(source)],
        positions_U=torch.cat(positions),
        offsets_Q1=offsets_of(lengths),
        keys=None if torch.equal(lengths, key_lengths) else torch.cat([keys for _, keys in segments]),
        key_offsets_Q1=offsets_of(key_lengths),
        outputs_C=torch.cat(outputs)[sampled],
        targets_C=completions[sampled].long(),
        place_C=place[sampled],
        sequence_C=chosen_S.repeat_interleave(batch.response_lens_S[chosen_S])[sampled],
        needs_grad=needs_grad,
    )
